"""Specs and their refusals, without torch and without weights."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from core.errors import ModelError
from core.kv_layout import KvDtype
from deploy.model_path import resolve_model
from engine.models.read_spec import read_spec
from engine.models.spec import kv_dtype_for, kv_layout_for

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "eos_token_id": [3, 4],
}


def write_directory(path: Path, config: dict[str, Any], payload: bytes = bytes(range(16))) -> Path:
    """Write a directory whose only tensor is two by two; enough for a spec."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    content = struct.pack("<Q", len(header)) + header + payload
    (path / "model.safetensors").write_bytes(content)
    return path


def write_gguf(path: Path, *, architecture: str = "llama", **metadata: Any) -> Path:
    writer = GGUFWriter(path, architecture)
    for name, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 8,
        "feed_forward_length": 16,
        "attention.head_count": 2,
    }.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {index}" for index in range(100)])
    writer.add_tensor("token_embd.weight", np.zeros((100, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_smollm2_as_its_header_says() -> None:
    spec = read_spec(resolve_model(""))
    assert (spec.name, spec.num_layers, spec.hidden_size) == ("SmolLM2-135M-Instruct", 30, 576)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.intermediate_size, spec.vocab_size, spec.max_positions) == (1536, 49_152, 8192)
    assert (spec.rope_theta, spec.norm_eps, spec.tied_embeddings) == (100_000.0, 1e-5, True)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert kv_layout_for(spec, KvDtype.BF16, 16).block_bytes == 360 * 1024


def test_reading_a_spec_imports_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from engine.models.read_spec import read_spec;"
        f"read_spec(Path({str(resolve_model(''))!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hugging_face_defaults_and_lists(tmp_path: Path) -> None:
    spec = read_spec(write_directory(tmp_path / "tiny", CONFIG))
    assert (spec.name, spec.num_kv_heads, spec.head_dim, spec.rope_theta) == ("tiny", 2, 4, 1e4)
    assert spec.eos_token_ids == (3, 4)
    assert not spec.tied_embeddings


def test_generation_config_adds_its_eos(tmp_path: Path) -> None:
    write_directory(tmp_path, CONFIG)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert read_spec(tmp_path).eos_token_ids == (9, 3, 4)


def test_rope_theta_in_the_new_place(tmp_path: Path) -> None:
    parameters = {"rope_theta": 5e5, "rope_type": "default"}
    spec = read_spec(write_directory(tmp_path, CONFIG | {"rope_parameters": parameters}))
    assert spec.rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2"}, "model_type = 'qwen2'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type = 'llama3'"),
        ({"rope_parameters": {"type": "yarn"}}, "rope_type = 'yarn'"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"head_dim": 3}, "head_dim = 3"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    write_directory(tmp_path, CONFIG | change)
    with pytest.raises(ModelError, match=named):
        read_spec(tmp_path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_spec(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ModelError, match="is neither"):
        read_spec(tmp_path / "notes.txt")
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match=r"model\.safetensors: missing"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"", "not a safetensors file"), (b"\xff" * 64, "not a safetensors file"),
     (struct.pack("<Q", 4) + b"nope", "damaged")],
)  # fmt: skip
def test_damaged_safetensors(tmp_path: Path, content: bytes, named: str) -> None:
    write_directory(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=named):
        read_spec(tmp_path)


def test_a_safetensors_file_cut_short(tmp_path: Path) -> None:
    write_directory(tmp_path, CONFIG, payload=bytes(15))
    with pytest.raises(ModelError, match="cut short: tensor w"):
        read_spec(tmp_path)


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    write_directory(tmp_path, CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    with pytest.raises(ModelError, match=r"a\.safetensors: missing"):
        read_spec(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="not an index"):
        read_spec(tmp_path)


def test_gguf_without_optional_keys(tmp_path: Path) -> None:
    spec = read_spec(write_gguf(tmp_path / "Tiny-1M-F16.gguf"))
    assert (spec.name, spec.vocab_size, spec.num_kv_heads, spec.head_dim) == ("Tiny-1M", 100, 2, 4)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.norm_eps) == (None, (), 1e-5)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama__attention__sliding_window": 512}, "sliding_window = 512"),
        ({"llama__expert_count": 8}, "expert_count = 8"),
        ({"tokenizer__ggml__bos_token_id": "one"}, "needed as int"),
    ],
)
def test_gguf_refusals(tmp_path: Path, metadata: dict[str, Any], named: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", **metadata)
    with pytest.raises(ModelError, match=named):
        read_spec(path)


def test_a_gguf_file_cut_short_or_of_another_version(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "part.gguf"
    for length, named in ((len(whole) - 64, "cut short"), (200, "damaged"), (30, "damaged")):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=named):
            read_spec(path)
    path.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(ModelError, match="GGUF version 1"):
        read_spec(path)


def test_fingerprints_name_weights_and_arithmetic(tmp_path: Path) -> None:
    one = read_spec(write_directory(tmp_path / "one", CONFIG)).fingerprint
    moved = read_spec(write_directory(tmp_path / "two", CONFIG)).fingerprint
    tuned = read_spec(write_directory(tmp_path / "three", CONFIG, payload=bytes(16))).fingerprint
    other_eps = CONFIG | {"rms_norm_eps": 1e-5}
    eps = read_spec(write_directory(tmp_path / "four", other_eps)).fingerprint
    longer = CONFIG | {"max_position_embeddings": 99}
    context = read_spec(write_directory(tmp_path / "five", longer)).fingerprint
    assert one == moved == context
    assert len({one, tuned, eps}) == 3
    assert len(one) == 32


def test_kv_dtype_auto_is_bf16() -> None:
    assert kv_dtype_for("auto") == kv_dtype_for("bf16") == KvDtype.BF16
    assert kv_dtype_for("f32") == KvDtype.F32
