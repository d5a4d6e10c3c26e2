"""Small random llamas for shapes that SmolLM2 does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models.spec import ModelSpec

VOCAB_SIZE = 97


def tiny_spec(**fields: Any) -> ModelSpec:
    """Return the spec of a two-layer model that no file holds."""
    numbers: dict[str, Any] = {
        "name": "tiny",
        "architecture": "llama",
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB_SIZE,
        "rope_theta": 10_000.0,
        "norm_eps": 1e-5,
        "tied_embeddings": True,
        "max_positions": 256,
        "bos_token_id": None,
        "eos_token_ids": (),
        "activation": "silu",
        "fingerprint": "00" * 16,
    }
    return ModelSpec(**(numbers | fields))


def save_tiny(
    directory: Path, *, shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **fields: Any
) -> LlamaForCausalLM:
    """Save a random model as transformers does, and return it in float32.

    Weights are large enough for attention and gates to matter.
    """
    numbers: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**(numbers | fields)))
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    # Read again: the rotary frequencies were rounded with the rest.
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
