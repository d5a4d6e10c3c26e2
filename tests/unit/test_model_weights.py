"""Weights: every GGUF type against gguf's own dequantizer, row orders, safetensors as they are."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file

from core.errors import ModelError
from engine.models.dequantize import dequantize
from engine.models.gguf_file import read_header
from engine.models.gguf_llama import hugging_face_name
from engine.models.weights import expected_shapes, load_weights, unpermute_rows
from tests.tiny_models import tiny_spec

TYPES = [
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_1,
]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_dequantize_agrees_with_ggufs_own(kind: GGMLQuantizationType) -> None:
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)
    raw = np.frombuffer(stored.tobytes(), np.uint8)
    ours = dequantize(raw, kind.name, values.shape)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(stored, kind))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_a_gguf_file_of_one_type_round_trips(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    path = tmp_path / "one.gguf"
    values = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = read_header(path).tensors
    assert (tensor.dtype, tensor.shape) == (kind.name, (4, 64))
    raw = np.fromfile(path, np.uint8)[tensor.offset : tensor.offset + tensor.num_bytes]
    expected = gguf.quants.dequantize(stored, kind)
    np.testing.assert_array_equal(dequantize(raw, tensor.dtype, tensor.shape), expected)


def test_an_unsupported_type_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "q4_0.gguf"
    kind = GGMLQuantizationType.Q4_0
    writer = GGUFWriter(path, "llama")
    stored = gguf.quants.quantize(np.ones((1, 32), np.float32), kind)
    writer.add_tensor("output.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"output\.weight is Q4_0; supported types are BF16"):
        read_header(path)


def test_unpermute_undoes_llama_cpps_permutation() -> None:
    heads, head_dim, width = 3, 8, 5
    weight = torch.arange(heads * head_dim * width).float().view(-1, width)
    # As in llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute.
    halves = weight.view(heads, 2, head_dim // 2, width)
    permuted = halves.swapaxes(1, 2).reshape(weight.shape)
    assert torch.equal(unpermute_rows(permuted, head_dim), weight)
    assert not torch.equal(permuted, weight)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_k.weight", "model.layers.12.self_attn.k_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("rope_freqs.weight", None),
        ("blk.0.attn_q.bias", None),
        ("blk.0.ffn_gate_exps.weight", None),
    ],
)
def test_names(name: str, expected: str | None) -> None:
    assert hugging_face_name(name) == expected


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    spec = tiny_spec()
    tensors = {name: torch.zeros(shape) for name, shape in expected_shapes(spec).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_weights(spec, tmp_path).keys() == tensors.keys()
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \(3,\).*implies \(32,\)"):
        load_weights(spec, tmp_path)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        load_weights(spec, tmp_path)


def test_safetensors_keep_their_element_type(tmp_path: Path) -> None:
    spec = tiny_spec()
    shapes = expected_shapes(spec).items()
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_weights(spec, tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
