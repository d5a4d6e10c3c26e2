"""The native CPU kernels: one library, all instruction sets, chosen when it is loaded.

Its sources stand in csrc/; setup.py builds them at install. Nothing here needs torch.
"""
