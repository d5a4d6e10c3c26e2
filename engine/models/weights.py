"""A model file's weights under Hugging Face's names, read one by one as they are asked for.

So a model never stands in memory twice: what an op has packed, nobody else holds. Bytes stay as the
file has them: whoever packs a weight wants one file's blocks as they are, and another's as float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from core.errors import ModelError
from engine.models.dequantize import dequantize
from engine.models.fingerprint import TensorInfo
from engine.models.gguf_file import read_header
from engine.models.gguf_names import hugging_face_name, permutes_heads
from engine.models.safetensors_file import read_tensors, shard_paths
from engine.models.spec import ModelSpec
from engine.models.tensor_shapes import difference

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class StoredWeight(msgspec.Struct, frozen=True):
    """One tensor as its file has it.

    Attributes:
        dtype: the file format's name of the element or block type ("BF16", "Q4_1").
        shape: rows first.
        raw: uint8 [rows, bytes a row]; a vector's rows are its elements. A view of the mapped file
            where it can be.
    """

    dtype: str
    shape: tuple[int, ...]
    raw: Bytes

    def rows(self, first: int, count: int) -> StoredWeight:
        """Return at most `count` rows from `first` on."""
        raw = self.raw[first : first + count]
        return StoredWeight(self.dtype, (len(raw), *self.shape[1:]), raw)

    def float32(self) -> Floats:
        """Return the values, float32 of `shape`, a new array."""
        return dequantize(np.ascontiguousarray(self.raw).reshape(-1), self.dtype, self.shape)


class Weights(Mapping[str, StoredWeight]):
    """Weights by name; each is read anew when it is asked for.

    Attributes:
        tensors: what is there, from the files' headers.
    """

    def __init__(self, tensors: dict[str, TensorInfo]) -> None:
        self.tensors = tensors

    @abstractmethod
    def __getitem__(self, name: str) -> StoredWeight:
        """Read one."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def open_weights(spec: ModelSpec, path: Path) -> Weights:
    """Return every weight of the model, none of them read yet.

    Linear weights are [out_features, in_features].

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
    """Safetensors files."""

    def __init__(self, directory: Path) -> None:
        tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, Bytes] = {}
        for shard in shard_paths(directory):
            data = np.memmap(shard, np.uint8, "r")
            for tensor in read_tensors(shard):
                tensors[tensor.name] = tensor
                self._files[tensor.name] = data
        super().__init__(tensors)

    def __getitem__(self, name: str) -> StoredWeight:
        return _stored(self.tensors[name], self._files[name])


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

    def __getitem__(self, name: str) -> StoredWeight:
        weight = _stored(self.tensors[name], self._data)
        if not self._permuted or not (".q_proj." in name or ".k_proj." in name):
            return weight
        return msgspec.structs.replace(weight, raw=unpermute_rows(weight.raw, self._head_dim))


def _stored(tensor: TensorInfo, data: Bytes) -> StoredWeight:
    raw = np.asarray(data[tensor.offset : tensor.offset + tensor.num_bytes])
    num_rows = tensor.shape[0] if tensor.shape else 1
    return StoredWeight(tensor.dtype, tensor.shape, raw.reshape(num_rows, -1))


def unpermute_rows(rows: npt.NDArray[np.uint8], head_dim: int) -> npt.NDArray[np.uint8]:
    """Undo llama.cpp's row order of Q and K.

    Its RoPE rotates neighbouring pairs, so its converter interleaved the two halves of each head:
    stored row 2 i + j of a head is row j * head_dim / 2 + i here.

    Args:
        rows: [heads * head_dim, bytes a row], whole blocks of any type.
        head_dim: rows a head.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
