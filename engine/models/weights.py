"""Weights as float32 or their stored float tensors, under Hugging Face's names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike
from torch import Tensor

from core.errors import ModelError
from engine.models.dequantize import dequantize
from engine.models.gguf_file import read_header
from engine.models.gguf_llama import hugging_face_name
from engine.models.safetensors_file import shard_paths
from engine.models.spec import ModelSpec


def load_weights(spec: ModelSpec, path: Path) -> dict[str, Tensor]:
    """Return every weight of the model, on the CPU.

    GGUF tensors are dequantized to float32; safetensors keep their element type. Linear weights are
    [out_features, in_features].

    Args:
        spec: what `read_spec(path)` returned.
        path: a Hugging Face directory or a GGUF file.

    Raises:
        ModelError: a tensor is missing or has another shape than the spec implies.
    """
    weights = _from_shards(path) if path.is_dir() else _from_gguf(spec, path)
    for name, shape in expected_shapes(spec).items():
        found = tuple(weights[name].shape) if name in weights else "missing"
        if found != shape:
            msg = f"{path}: tensor {name} is {found}, the model's configuration implies {shape}"
            raise ModelError(msg)
    return weights


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query_width, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_width, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_width, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query_width),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _from_shards(directory: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for shard in shard_paths(directory):
        weights |= load_file(shard)
    return weights


def _from_gguf(spec: ModelSpec, path: Path) -> dict[str, Tensor]:
    data = np.memmap(path, np.uint8, "r")
    weights: dict[str, Tensor] = {}
    for tensor in read_header(path).tensors:
        name = hugging_face_name(tensor.name)
        assert name is not None  # read_spec refused the file otherwise
        raw = np.asarray(data[tensor.offset : tensor.offset + tensor.num_bytes])
        weight = torch.as_tensor(dequantize(raw, tensor.dtype, tensor.shape))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = unpermute_rows(weight, spec.head_dim)
        weights[name] = weight
    return weights


def unpermute_rows(weight: Tensor, head_dim: int) -> Tensor:
    """Undo llama.cpp's row order of Q and K.

    Its RoPE rotates neighbouring pairs, so its converter interleaved the two halves of each head:
    stored row 2 i + j of a head is row j * head_dim / 2 + i here.

    Args:
        weight: [heads * head_dim, in_features].
        head_dim: rows a head.
    """
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
