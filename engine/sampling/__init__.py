"""Logits -> tokens. Counter-based, so that a token depends on its own sequence alone.

`sampler` states the order of the rules (vLLM's); `gumbel` and `philox` define the noise bitwise.
Nothing here knows models, blocks or steps.
"""
