"""The arithmetic of a program's ops, behind one interface.

`interface` says what an op computes and on what; `reference` does it in torch on any device. Paged
memory is addressed through `paged_kv`, which knows the layout and nothing of models or steps. `cpu`
is a library of its own, whose ops are whole steps; it needs no torch.
"""
