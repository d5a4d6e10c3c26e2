"""GGUF files: logits against transformers on the same weights, and what their headers say."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from core.errors import ModelError
from engine.models.gguf_file import TENSOR_TYPES
from engine.models.read_spec import read_spec
from engine.models.rope_scaling import FrequencyDivisors, LinearScaling, YarnScaling
from engine.models.weights import open_weights
from tests.step_driver import StepDriver, work
from tests.tiny_gguf import write_gguf
from tests.tiny_models import TOKENS, llama3_divisors, llama3_scaling, reference, save_tiny

TOLERANCE = 1e-4  # measured: 1.2e-5, as from safetensors
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DIVISORS = np.array(llama3_divisors(8, 5e5, 8.0, 64), np.float32)
Tiny = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
MODELS: dict[str, Tiny] = {  # architecture, fields of the configuration, metadata, more tensors
    "llama": ("llama", {"tie_word_embeddings": True}, {}, {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}, {}),
    "llama-3": (
        "llama",
        {"rope_parameters": llama3_scaling(64)},
        {},
        {"rope_freqs.weight": DIVISORS},
    ),
    "llama-linear": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {},
    ),
    "mistral": ("llama", {"model_type": "mistral", "sliding_window": None, "head_dim": 16}, {}, {}),
    "qwen2": (
        "qwen2",
        {"model_type": "qwen2", "rope_scaling": YARN},
        {
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 64,
        },
        {},
    ),
    "qwen3": (
        "qwen3",
        {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        {},
        {},
    ),
    "smollm3": ("smollm3", {"model_type": "smollm3", "num_hidden_layers": 4}, {}, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, fields, metadata, extra = MODELS[name]
    model = save_tiny(tmp_path / "directory", **fields)
    path = write_gguf(tmp_path / "tiny.gguf", model, architecture, metadata=metadata, extra=extra)
    check_logits(path, model)


@pytest.mark.parametrize("kind", [name for name, _, _ in TENSOR_TYPES.values()])
def test_logits_of_stored_types(tmp_path: Path, kind: str) -> None:
    """The reference computes with the weights that the file holds, dequantized by gguf's own."""
    width = 256 if kind.endswith("_K") else 64
    model = save_tiny(tmp_path / "directory", hidden_size=width, intermediate_size=width)
    path = write_gguf(tmp_path / "tiny.gguf", model, kind=GGMLQuantizationType[kind])
    check_logits(path, model)


def check_logits(path: Path, model: Any) -> None:
    driver = StepDriver(path, num_blocks=16)
    parts = [driver.logits(work(0, 140), added=(driver.added(0, TOKENS),))]
    parts += [driver.logits(work(0, 1)) for _ in range(10)]
    driver.close()
    torch.testing.assert_close(torch.cat(parts), reference(model, TOKENS), atol=TOLERANCE, rtol=0.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_tiny(tmp_path_factory.mktemp("tiny"), num_key_value_heads=4, eos_token_id=None)


def test_optional_keys_may_be_missing(tmp_path: Path, tiny: Any) -> None:
    optional = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    missing = dict.fromkeys(f"llama.{key}" for key in (*optional, "rope.freq_base"))
    spec = read_spec(write_gguf(tmp_path / "Tiny-1M-Q4_K_M.gguf", tiny, metadata=missing))
    assert (spec.name, spec.vocab_size, spec.num_kv_heads, spec.head_dim) == ("Tiny-1M", 97, 4, 8)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.norm_eps) == (None, (), 1e-6)
    assert (spec.rope_theta, spec.rope_scaling) == (10_000.0, None)


def test_token_ids_and_keys_without_effect(tmp_path: Path, tiny: Any) -> None:
    metadata = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "llama.tensor_data_layout": "Meta AI original pth",
        "llama.rope.scaling.finetuned": True,
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 8.0,
    }
    spec = read_spec(write_gguf(tmp_path / "tiny.gguf", tiny, metadata=metadata))
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 3))
    assert spec.rope_scaling is None


def test_scaling_as_files_say_it(tmp_path: Path, tiny: Any) -> None:
    """The type was once a key of its own; without one it is linear, and YaRN stretches the
    context."""
    old = {"llama.rope.scale_linear": 4.0}
    assert read_spec(write_gguf(tmp_path / "a.gguf", tiny, metadata=old)).rope_scaling == (
        LinearScaling(4.0)
    )
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    spec = read_spec(write_gguf(tmp_path / "b.gguf", tiny, metadata=yarn))
    assert isinstance(spec.rope_scaling, YarnScaling)
    assert (spec.rope_scaling.original_positions, spec.max_positions) == (256, 512)
    extra = {"rope_freqs.weight": np.ones(4, np.float32)}
    spec = read_spec(write_gguf(tmp_path / "c.gguf", tiny, extra=extra))
    assert spec.rope_scaling == FrequencyDivisors((1.0,) * 4)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "'longrope': .*supported: none, linear, yarn"),
        ({"llama.attention.sliding_window": 512}, "sliding_window = 512: not supported, only 0"),
        ({"llama.expert_count": 8}, "expert_count = 8: not supported, only 0"),
        ({"llama.final_logit_softcapping": 30.0}, "softcapping = 30.0: not supported, only 0.0"),
        ({"llama.attention.value_residual": 1}, "value_residual = 1: not supported: not known"),
        ({"llama.attention.value_length": 4}, "value_length = 4: not supported, only head_dim = 8"),
        ({"llama.rope.dimension_count": 4}, "dimension_count = 4"),
        ({"llama.attention.head_count": 0}, "head_count = 0: must be at least 1"),
        ({"llama.attention.head_count_kv": [4, 4]}, "head_count_kv = .4, 4.: needed as int"),
        ({"llama.rope.freq_base": -1.0}, "freq_base = -1.0: must be above 0"),
        ({"llama.block_count": None}, "block_count = None: needed as int"),
        ({"tokenizer.ggml.bos_token_id": "one"}, "needed as int"),
        ({"split.count": 3}, "one of 3 parts; join them with"),
    ],
)
def test_refusals_name_key_and_value(
    tmp_path: Path, tiny: Any, metadata: dict[str, Any], named: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny, metadata=metadata)
    with pytest.raises(ModelError, match=named):
        read_spec(path)


def test_other_architectures_are_refused(tmp_path: Path, tiny: Any) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny, "gemma3")
    with pytest.raises(ModelError, match="'gemma3' is not supported; supported: llama, qwen2, qw"):
        read_spec(path)


@pytest.mark.parametrize(
    ("extra", "metadata", "named"),
    [
        ({"blk.0.ffn_gate_inp.weight": np.ones((4, 4))}, {}, "ffn_gate_inp.weight is not part of"),
        ({"rope_freqs.weight": np.ones(3)}, {}, r"is F32 \(3,\); must be F32 \(4,\)"),
        ({"rope_freqs.weight": np.zeros(4)}, {}, "must be finite and above 0"),
        (
            {"rope_freqs.weight": np.ones(4)},
            {"llama.rope.scaling.factor": 2.0},
            "not supported beside the tensor rope_freqs",
        ),
    ],
)
def test_tensors_of_other_models_are_refused(
    tmp_path: Path, tiny: Any, extra: dict[str, Any], metadata: dict[str, Any], named: str
) -> None:
    floats = {name: values.astype(np.float32) for name, values in extra.items()}
    path = write_gguf(tmp_path / "model.gguf", tiny, metadata=metadata, extra=floats)
    with pytest.raises(ModelError, match=named):
        read_spec(path)


def test_a_file_cut_short_or_of_another_version(tmp_path: Path, tiny: Any) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny).read_bytes()
    path = tmp_path / "part.gguf"
    for length, named in ((len(whole) - 64, "cut short"), (200, "damaged"), (30, "damaged")):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=named):
            read_spec(path)
    path.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(ModelError, match="GGUF version 1"):
        read_spec(path)


def test_a_missing_table_is_named(tmp_path: Path, tiny: Any) -> None:
    """The vocabulary's size may stand in the metadata instead."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny, metadata={"llama.vocab_size": 97})
    path.write_bytes(path.read_bytes().replace(b"token_embd.weight", b"blk.9.ffn_up.bias"))
    spec = read_spec(path)
    assert spec.vocab_size == 97
    with pytest.raises(ModelError, match=r"embed_tokens.weight is missing.*implies \(97, 32\)"):
        open_weights(spec, path)
