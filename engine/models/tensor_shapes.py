"""Which tensors a spec implies, by Hugging Face's names, and their shapes."""

from __future__ import annotations

import re

from engine.models.spec import ModelSpec

Shape = tuple[int, ...]

_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that old checkpoints hold: they follow from the configuration."""


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of each weight by its name. Linear weights: [out_features, in_features]."""
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        for name, shape in _layer_shapes(spec).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def difference(spec: ModelSpec, found: dict[str, Shape]) -> str | None:
    """Say which tensor is missing, misshapen or unknown; None where all fit.

    One that the program would not read is a part of the model that it would leave out.

    Args:
        spec: what the configuration says.
        found: shapes of the file's tensors by Hugging Face's names.
    """
    expected = expected_shapes(spec)
    for name, shape in expected.items():
        if found.get(name) != shape:
            is_there = found.get(name, "missing")
            return f"tensor {name} is {is_there}, the model's configuration implies {shape}"
    for name in found:
        if name not in expected and name != "lm_head.weight" and not _IGNORED.fullmatch(name):
            return (
                f"tensor {name} is not part of a {spec.architecture} with this configuration; "
                "not supported"
            )
    return None


def _layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears: dict[str, tuple[Shape, bool]] = {
        "self_attn.q_proj": ((query_width, hidden), spec.qkv_bias),
        "self_attn.k_proj": ((kv_width, hidden), spec.qkv_bias),
        "self_attn.v_proj": ((kv_width, hidden), spec.qkv_bias),
        "self_attn.o_proj": ((hidden, query_width), spec.output_bias),
        "mlp.gate_proj": ((inner, hidden), spec.mlp_bias),
        "mlp.up_proj": ((inner, hidden), spec.mlp_bias),
        "mlp.down_proj": ((hidden, inner), spec.mlp_bias),
    }
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for module, (shape, has_bias) in linears.items():
        shapes[f"{module}.weight"] = shape
        if has_bias:
            shapes[f"{module}.bias"] = shape[:1]
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes
