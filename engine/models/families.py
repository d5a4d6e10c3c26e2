"""What `config.json` leaves unsaid: each family's parts and defaults, as transformers has them."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.models.spec import Architecture

Windows = Literal["none", "all", "chosen"]


class Family(msgspec.Struct, frozen=True):
    """One `model_type`.

    Attributes:
        architecture: its name.
        model_class: the only entry that `architectures` may have.
        num_kv_heads, head_dim: None: as many as heads; hidden_size / heads.
        sliding_window: the window where the key is missing.
        windows: "none": no layer slides; "all": all do, where there is a window; "chosen": with
            `use_sliding_window`, those that `layer_types` or the family's rule says.
        reads_attention_bias: `attention_bias` gives the four projections of attention biases.
        reads_mlp_bias: `mlp_bias` gives the three of the MLP biases.
        qkv_bias: queries, keys and values have biases, whatever the configuration says.
        qk_norm: heads of queries and keys are normalized.
        has_nope_layers: `no_rope_layers` says which layers rotate.
    """

    architecture: Architecture
    model_class: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    tied_embeddings: bool = False
    max_positions: int = 32_768
    sliding_window: int | None = None
    windows: Windows = "none"
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    has_nope_layers: bool = False


_FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        max_positions=2048,
        reads_attention_bias=True,
        reads_mlp_bias=True,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        num_kv_heads=8,
        max_positions=131_072,
        sliding_window=4096,
        windows="all",
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        num_kv_heads=32,
        sliding_window=4096,
        windows="chosen",
        qkv_bias=True,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        num_kv_heads=32,
        head_dim=128,
        sliding_window=4096,
        windows="chosen",
        reads_attention_bias=True,
        qk_norm=True,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        num_kv_heads=4,
        rope_theta=2e6,
        tied_embeddings=True,
        windows="chosen",
        reads_attention_bias=True,
        reads_mlp_bias=True,
        has_nope_layers=True,
    ),
)
FAMILIES: dict[str, Family] = {family.architecture: family for family in _FAMILIES}
"""By `model_type`."""
