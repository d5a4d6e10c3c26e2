"""GGUF files: metadata and tensor directory -> ModelSpec.

The metadata does not say everything: biases and tied embeddings show in the directory, Llama 3's
rope scaling is a tensor, and SmolLM3's layers without RoPE are a convention of llama.cpp.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Final, get_args

import msgspec

from core.errors import ModelError
from engine.models.fingerprint import TensorInfo, fingerprint
from engine.models.gguf_file import GgufHeader, read_header
from engine.models.gguf_metadata import GgufMetadata
from engine.models.gguf_names import ROPE_DIVISORS, hugging_face_name
from engine.models.rope_scaling import (
    FrequencyDivisors,
    LinearScaling,
    RopeScaling,
    YarnScaling,
    stretched_context,
    yarn_attention_factor,
)
from engine.models.spec import Architecture, ModelSpec

_QUANTIZATION_SUFFIX = re.compile(r"[.-](F32|F16|BF16|Q\d\w*)$", re.IGNORECASE)
_SMOLLM3_NOPE_INTERVAL: Final = 4  # n_no_rope_layer_step in llama.cpp, which no key holds


def read_gguf(path: Path) -> ModelSpec:
    """Read what the header says.

    Raises:
        ModelError: not GGUF, or the model has a part that is not implemented.
    """
    header = read_header(path)
    meta = GgufMetadata(path, header)
    architecture = _architecture(path, meta)
    meta.refuse_unsupported()
    tensors = {tensor.name: tensor for tensor in header.tensors}
    _refuse_unknown(path, header, tensors)
    num_layers, num_heads = meta.count("block_count"), meta.count("attention.head_count")
    hidden = meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", hidden // num_heads)
    _refuse_partial_heads(meta, head_dim)
    scaling = _rope_scaling(path, meta, tensors.get(ROPE_DIVISORS), head_dim)
    spec = ModelSpec(
        name=_QUANTIZATION_SUFFIX.sub("", path.stem),
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=meta.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=meta.count("feed_forward_length"),
        vocab_size=_vocab_size(meta, tensors),
        rope_theta=meta.positive("rope.freq_base", 10_000.0),
        rope_scaling=scaling,
        nope_layers=_nope_layers(architecture, num_layers),
        norm_eps=meta.positive("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=architecture == "qwen3",
        max_positions=stretched_context(meta.count("context_length"), scaling),
        bos_token_id=next(iter(_token_ids(meta, "bos")), None),
        eos_token_ids=tuple(dict.fromkeys(_token_ids(meta, "eos", "eot"))),
        activation="silu",
        fingerprint="",
    )
    name = fingerprint([(path, header.tensors)], spec.arithmetic())
    return msgspec.structs.replace(spec, fingerprint=name)


def _architecture(path: Path, meta: GgufMetadata) -> Architecture:
    for known in get_args(Architecture):
        if meta.architecture == known and known != "mistral":  # whose files say llama
            return known
    msg = (
        f"{path}: architecture {meta.architecture!r} is not supported; supported: llama, qwen2, "
        "qwen3, smollm3"
    )
    raise ModelError(msg)


def _refuse_unknown(path: Path, header: GgufHeader, tensors: dict[str, TensorInfo]) -> None:
    num_parts = header.metadata.get("split.count", 0)
    if isinstance(num_parts, int) and num_parts > 1:
        msg = f"{path}: one of {num_parts} parts; join them with llama.cpp's gguf-split --merge"
        raise ModelError(msg)
    for name in tensors:
        if hugging_face_name(name) is None and name != ROPE_DIVISORS:
            msg = f"{path}: tensor {name} is not part of a plain llama or Qwen; not supported"
            raise ModelError(msg)


def _refuse_partial_heads(meta: GgufMetadata, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        width = meta.count(key, head_dim)
        if width != head_dim:
            raise meta.error(meta.own(key), width, f"not supported, only head_dim = {head_dim}")


def _vocab_size(meta: GgufMetadata, tensors: dict[str, TensorInfo]) -> int:
    table = tensors.get("token_embd.weight")
    return table.shape[0] if table is not None else meta.count("vocab_size")


def _rope_scaling(
    path: Path, meta: GgufMetadata, divisors: TensorInfo | None, head_dim: int
) -> RopeScaling | None:
    factor = meta.positive("rope.scaling.factor", meta.positive("rope.scale_linear", 1.0))
    key = meta.own("rope.scaling.type")
    kind = meta.get(key, "linear")  # llama.cpp's own reading of a file that does not say
    if kind not in ("none", "linear", "yarn"):
        raise meta.error(key, kind, "not supported; supported: none, linear, yarn")
    if kind == "none" or factor == 1.0:
        return _read_divisors(path, divisors, head_dim) if divisors is not None else None
    if divisors is not None:
        raise meta.error(key, kind, f"not supported beside the tensor {ROPE_DIVISORS}")
    if kind == "linear":
        return LinearScaling(factor)
    trained = meta.count("context_length")
    return YarnScaling(
        factor=factor,
        original_positions=meta.count("rope.scaling.original_context_length", trained),
        attention_factor=yarn_attention_factor(factor),
    )


def _read_divisors(path: Path, tensor: TensorInfo, head_dim: int) -> FrequencyDivisors:
    if tensor.dtype != "F32" or tensor.shape != (head_dim // 2,):
        msg = (
            f"{path}: tensor {tensor.name} is {tensor.dtype} {tensor.shape}; must be F32 "
            f"({head_dim // 2},)"
        )
        raise ModelError(msg)
    with path.open("rb") as file:
        file.seek(tensor.offset)
        values = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.num_bytes))
    if not all(0 < value < float("inf") for value in values):
        msg = f"{path}: tensor {tensor.name}: all values must be finite and above 0"
        raise ModelError(msg)
    return FrequencyDivisors(values)


def _nope_layers(architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    if architecture != "smollm3":
        return ()
    return tuple(range(_SMOLLM3_NOPE_INTERVAL - 1, num_layers, _SMOLLM3_NOPE_INTERVAL))


def _token_ids(meta: GgufMetadata, *kinds: str) -> list[int]:
    ids = [meta.get(f"tokenizer.ggml.{kind}_token_id", -1) for kind in kinds]
    return [token_id for token_id in ids if token_id >= 0]
