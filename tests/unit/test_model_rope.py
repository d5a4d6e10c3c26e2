"""Rotary frequencies of published models, equal to transformers' to the last bit.

Tiny models have short contexts; at the positions that these reach, a rounding would show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.kernels.rope import rope_tables, torch_frequencies
from engine.models.hugging_face_config import HuggingFaceConfig
from engine.models.hugging_face_rope import read_rope
from engine.models.rope_frequencies import attention_factor, rope_frequencies
from engine.models.rope_scaling import FrequencyDivisors, RopeScaling
from tests.tiny_models import llama3_divisors

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
PUBLISHED: dict[str, tuple[float, int, dict[str, Any] | None]] = {
    "llama-2": (1e4, 4096, None),
    "llama-2-32k": (1e4, 32_768, {"type": "linear", "factor": 8.0}),
    "llama-3": (5e5, 8192, None),
    "llama-3.1": (
        5e5,
        131_072,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "smollm2": (1e5, 8192, None),
    "qwen2.5": (1e6, 32_768, YARN),
    "narrow ramp": (1e4, 32_768, YARN | {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_are_those_of_transformers(name: str) -> None:
    theta, max_positions, scaling = PUBLISHED[name]
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "max_position_embeddings": max_positions,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    theirs: Any = LlamaRotaryEmbedding(
        LlamaConfig(**msgspec.json.decode(msgspec.json.encode(sizes)))
    )
    others = dict.fromkeys(("num_hidden_layers", "intermediate_size", "vocab_size"), 8)
    config = msgspec.convert({"model_type": "llama", **sizes, **others}, HuggingFaceConfig)
    base, ours = read_rope(Path("config.json"), config)
    frequencies = torch_frequencies(128, base, ours)
    assert torch.equal(frequencies, theirs.inv_freq)
    last = max_positions - 1
    cos, sin = theirs(torch.ones(1), torch.tensor([[last]]))
    our_cos, our_sin = rope_tables(
        last + 1, frequencies, attention_factor(ours), torch.device("cpu")
    )
    assert torch.equal(our_cos[last], cos[0, 0])
    assert torch.equal(our_sin[last].abs(), sin[0, 0].abs())  # `rotate` wants a sign of its own


def published(name: str) -> tuple[float, RopeScaling | None]:
    """Return what we read of a published model's configuration."""
    theta, max_positions, scaling = PUBLISHED[name]
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), 8)
    others = dict.fromkeys(("intermediate_size", "vocab_size"), 8)
    stated = {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": max_positions,
    }
    config = msgspec.convert(
        {"model_type": "llama", **sizes, **others, **stated}, HuggingFaceConfig
    )
    return read_rope(Path("config.json"), config)


def test_divisors_of_a_gguf_file_are_llama3s_scaling() -> None:
    """What llama.cpp's converter writes into `rope_freqs.weight` for Llama 3.1."""
    base, ours = published("llama-3.1")
    divisors = FrequencyDivisors(tuple(llama3_divisors(128, base, 8.0, 8192)))
    np.testing.assert_allclose(
        rope_frequencies(128, base, divisors), rope_frequencies(128, base, ours), rtol=1e-6
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_without_torch_they_differ_in_the_last_bits_of_few(name: str) -> None:
    """Powers are correctly rounded then, which torch's are not always."""
    base, ours = published(name)
    exact, theirs = rope_frequencies(128, base, ours), torch_frequencies(128, base, ours).numpy()
    assert exact.dtype == np.float32
    np.testing.assert_allclose(exact, theirs, rtol=2e-7)
    assert (exact != theirs).sum() <= 3
