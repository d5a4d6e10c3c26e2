"""A model file's weights under Hugging Face's names, read one by one as they are asked for.

So a model never stands in memory twice: what an op has packed, nobody else holds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from core.errors import ModelError
from engine.models.dequantize import dequantize
from engine.models.fingerprint import TensorInfo
from engine.models.gguf_file import read_header
from engine.models.gguf_names import hugging_face_name, permutes_heads
from engine.models.safetensors_file import read_tensors, shard_paths
from engine.models.spec import ModelSpec
from engine.models.tensor_shapes import difference


class Weights(Mapping[str, Tensor]):
    """Tensors on the CPU by name; each is made anew when it is asked for.

    Attributes:
        tensors: what is there, from the files' headers.
    """

    def __init__(self, tensors: dict[str, TensorInfo]) -> None:
        self.tensors = tensors

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor:
        """Read one."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def open_weights(spec: ModelSpec, path: Path) -> Weights:
    """Return every weight of the model, none of them read yet.

    GGUF tensors are dequantized to float32; safetensors keep their element type. Linear weights are
    [out_features, in_features].

    Args:
        spec: what `read_spec(path)` returned.
        path: a Hugging Face directory or a GGUF file.

    Raises:
        ModelError: a tensor is missing, has another shape than the spec implies, or is one that it
            does not know.
    """
    weights = _ShardWeights(path) if path.is_dir() else _GgufWeights(spec, path)
    wrong = difference(spec, {name: tensor.shape for name, tensor in weights.tensors.items()})
    if wrong is not None:
        msg = f"{path}: {wrong}"
        raise ModelError(msg)
    return weights


class _ShardWeights(Weights):
    """Safetensors files; their tensors are views of the mapped files."""

    def __init__(self, directory: Path) -> None:
        tensors: dict[str, TensorInfo] = {}
        self._shards: dict[str, Path] = {}
        for shard in shard_paths(directory):
            for tensor in read_tensors(shard):
                tensors[tensor.name] = tensor
                self._shards[tensor.name] = shard
        super().__init__(tensors)

    def __getitem__(self, name: str) -> Tensor:
        opened: Any = safe_open(self._shards[name], framework="pt")
        with opened as file:
            return file.get_tensor(name)


class _GgufWeights(Weights):
    """A GGUF file."""

    def __init__(self, spec: ModelSpec, path: Path) -> None:
        self._data = np.memmap(path, np.uint8, "r")
        self._head_dim = spec.head_dim
        self._permuted = permutes_heads(spec.architecture)
        tensors: dict[str, TensorInfo] = {}
        for tensor in read_header(path).tensors:
            name = hugging_face_name(tensor.name)
            if name is not None:  # the spec read the others
                tensors[name] = tensor
        super().__init__(tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        raw = np.asarray(self._data[tensor.offset : tensor.offset + tensor.num_bytes])
        weight = torch.as_tensor(dequantize(raw, tensor.dtype, tensor.shape))
        if self._permuted and (".q_proj." in name or ".k_proj." in name):
            weight = unpermute_rows(weight, self._head_dim)
        return weight


def unpermute_rows(weight: Tensor, head_dim: int) -> Tensor:
    """Undo llama.cpp's row order of Q and K.

    Its RoPE rotates neighbouring pairs, so its converter interleaved the two halves of each head:
    stored row 2 i + j of a head is row j * head_dim / 2 + i here.

    Args:
        weight: [heads * head_dim, in_features], or a bias, [heads * head_dim].
        head_dim: rows a head.
    """
    pairs = weight.view(-1, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
