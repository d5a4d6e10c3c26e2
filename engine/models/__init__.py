"""What a model is: its spec, its weights and its program of ops.

`read_spec` says what a file holds without torch and without reading its weights; `open_weights`
gives tensors under Hugging Face's names; `compile_program` turns a spec into a flat list of ops
that any executor runs. Nothing here knows steps, slots or the pool.
"""
