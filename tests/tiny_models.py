"""Small random models of every family, for shapes and parts that SmolLM2 does not have."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine.models.spec import ModelSpec

VOCAB_SIZE = 97
TOKENS = [(37 * index * index + 11 * index + 5) % VOCAB_SIZE for index in range(150)]


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
    directory: Path,
    *,
    model_type: str = "llama",
    shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    edit: Callable[[str, Tensor], Tensor] = lambda _, weight: weight,
    **fields: Any,
) -> Any:
    """Save a random model as transformers does, and return it in float32.

    Weights are large enough for attention and gates to matter; biases are not the zeros, nor norms
    the ones, that an untrained model has.

    Args:
        directory: where to.
        model_type: the family.
        shard_size: files hold no more.
        dtype: of the file.
        edit: changes each parameter, given its name, before it is saved.
        **fields: of the configuration.
    """
    numbers: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(numbers | fields))
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            parameter.copy_(edit(name, parameter))
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    # Read again: the rotary frequencies were rounded with the rest.
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def reference(model: Any, token_ids: list[int]) -> Tensor:
    """Return transformers' logits, float32 [tokens, vocab_size]."""
    return model(torch.tensor([token_ids])).logits[0]


def llama3_scaling(original_positions: int, **fields: Any) -> dict[str, Any]:
    """Return Llama 3.1's parameters with another original context."""
    return {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original_positions,
        **fields,
    }


def llama3_divisors(head_dim: int, theta: float, factor: float, original: int) -> list[float]:
    """Return what llama.cpp's converter writes as `rope_freqs.weight` for `llama3_scaling`."""
    divisors: list[float] = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - 1.0) / (4.0 - 1.0)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
