"""Weights: every GGUF type against gguf's own dequantizer, row orders, safetensors as they are."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file
from torch import Tensor

from core.errors import ModelError
from engine.executor.compiled_program import CompiledProgram
from engine.kernels.reference import ReferenceKernels
from engine.models.dequantize import dequantize
from engine.models.gguf_file import TENSOR_TYPES, read_header
from engine.models.gguf_names import hugging_face_name
from engine.models.llama import compile_program
from engine.models.tensor_shapes import expected_shapes
from engine.models.torch_weights import open_tensors
from engine.models.weights import open_weights, unpermute_rows
from tests.tiny_gguf import finish
from tests.tiny_models import tiny_spec

TYPES = [name for name, _, _ in TENSOR_TYPES.values()]
QUANTIZED = [name for name, block, _ in TENSOR_TYPES.values() if block > 1]
SCALES: dict[str, tuple[tuple[int, ...], ...]] = {  # where a block's f16 numbers lie
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0"), ((0, 1),)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), ((0, 1), (2, 3))),
    "Q6_K": ((208, 209),),
}


def test_types_have_ggufs_sizes() -> None:
    for number, (name, *sizes) in TENSOR_TYPES.items():
        assert GGMLQuantizationType(number).name == name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == tuple(sizes)


@pytest.mark.parametrize("name", TYPES)
def test_dequantize_agrees_with_ggufs_own(name: str) -> None:
    """Random bytes reach every bit of every field; floats are kept finite."""
    kind, rng = GGMLQuantizationType[name], np.random.default_rng(0)
    if name not in QUANTIZED:
        values = rng.normal(size=(6, 96)).astype(np.float32)
        check(kind, gguf.quants.quantize(values, kind).view(np.uint8), values.shape)
        return
    block, num_bytes = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (40, 3 * num_bytes), np.uint8)
    for start in range(0, raw.shape[1], num_bytes):
        for place in SCALES[name]:
            halves = rng.normal(size=len(raw)).astype("<f2")
            raw[:, [start + byte for byte in place]] = halves.view(np.uint8).reshape(-1, 2)
    check(kind, raw, (40, 3 * block))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("fill", [0, 0xFF, 0x0F, 0xF0, 0x80, 0x7F])
def test_blocks_of_extreme_values(name: str, fill: int) -> None:
    """Largest and smallest elements and group scales, under the largest f16 and a subnormal one."""
    kind = GGMLQuantizationType[name]
    block, num_bytes = GGML_QUANT_SIZES[kind]
    raw = np.full((4, num_bytes), fill, np.uint8)
    for place in SCALES[name]:
        halves = np.array([65_504, -65_504, 6e-8, -0.0], "<f2")
        raw[:, place] = halves.view(np.uint8).reshape(-1, 2)
    check(kind, raw, (4, block))


def check(kind: GGMLQuantizationType, raw: np.ndarray, shape: tuple[int, ...]) -> None:
    ours = dequantize(raw.reshape(-1), kind.name, shape)
    assert ours.dtype == np.float32
    expected = gguf.quants.dequantize(raw.view(np.float32) if kind.name == "F32" else raw, kind)
    np.testing.assert_array_equal(ours, expected)
    assert np.isfinite(ours).all()


@pytest.mark.parametrize("name", TYPES)
def test_a_gguf_file_of_one_type_round_trips(tmp_path: Path, name: str) -> None:
    """Offsets and sizes of the directory: a second tensor follows the first."""
    path, kind = tmp_path / "two.gguf", GGMLQuantizationType[name]
    block, num_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 60, (2, 4, 256 // block * num_bytes), np.uint8)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw[0], raw_dtype=kind)
    writer.add_tensor("blk.1.ffn_up.weight", raw[1], raw_dtype=kind)
    finish(writer)
    data = np.fromfile(path, np.uint8)
    for tensor, stored in zip(read_header(path).tensors, raw, strict=True):
        assert (tensor.dtype, tensor.shape) == (name, (4, 256))
        held = data[tensor.offset : tensor.offset + tensor.num_bytes]
        np.testing.assert_array_equal(held, stored.reshape(-1))


def test_an_unsupported_type_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "q2_k.gguf"
    writer = GGUFWriter(path, "llama")
    raw = np.zeros((1, 84), np.uint8)
    writer.add_tensor("output.weight", raw, raw_dtype=GGMLQuantizationType.Q2_K)
    finish(writer)
    with pytest.raises(ModelError, match=r"output\.weight is Q2_K; supported types are BF16, F16"):
        read_header(path)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q8_0.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", np.zeros((3, 33), np.int32))
    finish(writer)
    raw = path.read_bytes()
    at = raw.index(b"output.weight") + len(b"output.weight") + 4 + 16
    path.write_bytes(raw[:at] + (8).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(ModelError, match=r"output\.weight: rows of 33 are no whole Q8_0 blocks"):
        read_header(path)


def test_unpermute_undoes_llama_cpps_permutation() -> None:
    heads, head_dim = 3, 8
    rows = np.random.default_rng(0).integers(0, 256, (heads * head_dim, 5), np.uint8)
    # As in llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute.
    halves = rows.reshape(heads, 2, head_dim // 2, 5)
    permuted = halves.swapaxes(1, 2).reshape(rows.shape)
    assert (unpermute_rows(permuted, head_dim) == rows).all()
    assert not (permuted == rows).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_k.weight", "model.layers.12.self_attn.k_proj.weight"),
        ("blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("rope_freqs.weight", None),
        ("blk.0.attn_q.scale", None),
        ("blk.0.ffn_gate_exps.weight", None),
    ],
)
def test_names(name: str, expected: str | None) -> None:
    assert hugging_face_name(name) == expected


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in expected_shapes(tiny_spec()).items()}


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("model.norm.weight", (3,), r"model\.norm\.weight is \(3,\).*implies \(32,\)"),
        ("model.norm.weight", None, r"model\.norm\.weight is missing.*implies \(32,\)"),
        ("model.layers.1.self_attn.q_norm.weight", (8,), r"1\.self_attn\.q_norm\.weight is not pa"),
        ("model.layers.0.self_attn.q_proj.bias", (32,), r"q_proj\.bias is not part of a llama"),
        ("model.layers.2.mlp.up_proj.weight", (48, 32), r"layers\.2\.mlp.* is not part of a llama"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, named: str
) -> None:
    tensors = zeros()
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=named):
        open_weights(tiny_spec(), tmp_path)


def test_tensors_that_say_nothing_new_are_taken(tmp_path: Path) -> None:
    """A tied table is stored twice by some, and the rotary frequencies by old checkpoints."""
    more = {
        "lm_head.weight": torch.zeros(97, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    save_file(zeros() | more, tmp_path / "model.safetensors")
    assert len(open_weights(tiny_spec(), tmp_path)) == len(zeros()) + 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_safetensors_keep_their_element_type(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: torch.randn(tensor.shape).to(dtype) for name, tensor in zeros().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    opened = open_tensors(tiny_spec(), tmp_path)
    assert set(opened) == set(tensors)
    assert all(opened[name].dtype == dtype for name in tensors)
    assert all(torch.equal(opened[name], tensor) for name, tensor in tensors.items())
    stored = open_weights(tiny_spec(), tmp_path)
    assert all(
        torch.equal(torch.as_tensor(stored[n].float32()), tensors[n].float()) for n in tensors
    )


def test_each_weight_is_read_once_and_none_is_kept(tmp_path: Path) -> None:
    """Or a model would stand in memory twice while it loads. The tied table serves two ops."""

    class Counted(dict[str, Tensor]):
        def __init__(self) -> None:
            super().__init__(opened)
            self.asked: list[str] = []

        def __getitem__(self, name: str) -> Tensor:
            self.asked.append(name)
            return opened[name]

    save_file(zeros(), tmp_path / "model.safetensors")
    opened = open_tensors(tiny_spec(), tmp_path)
    counted, cpu = Counted(), torch.device("cpu")
    kernels = ReferenceKernels(torch.float32, torch.float32, cpu)
    CompiledProgram(compile_program(tiny_spec()), kernels, counted, cpu)
    assert sorted(counted.asked) == sorted(opened)
