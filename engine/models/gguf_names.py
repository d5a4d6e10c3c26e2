"""Tensor names of GGUF files and their names in Hugging Face's checkpoints."""

from __future__ import annotations

from engine.models.spec import Architecture

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_DIVISORS = "rope_freqs.weight"
"""Not a weight: what llama.cpp's converter makes of Llama 3's rope scaling."""


def hugging_face_name(name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, or None for one that no decoder here has."""
    if name in _NAMES:
        return _NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    kind, _, suffix = part.partition(".")
    if prefix != "blk" or kind not in _LAYER_NAMES or suffix not in ("weight", "bias"):
        return None
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"


def permutes_heads(architecture: Architecture) -> bool:
    """Whether llama.cpp's converter reorders the rows of Q and K for its RoPE of neighbours.

    It does for its LlamaModel and what derives from that; Qwen's RoPE is of halves there too.
    """
    return architecture in ("llama", "smollm3")
