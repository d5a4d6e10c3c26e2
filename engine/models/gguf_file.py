"""The header of a GGUF file (versions 2 and 3, little-endian): metadata and tensor directory.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Long arrays (the tokenizer's)
are stepped over: `gguf.GGUFReader` keeps views of every string and takes 2 s; this takes 50 ms.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Final

import msgspec

from core.errors import ModelError
from engine.models.fingerprint import TensorInfo

MAGIC: Final = b"GGUF"
KEPT_ARRAY_LENGTH: Final = 64
"""Longer arrays are stepped over; their metadata value is None."""

Value = int | float | bool | str | None | list["Value"]

_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING: Final = 8
_ARRAY: Final = 9

# ggml type id -> (name, elements a block, bytes a block); ids from ggml.h
TENSOR_TYPES: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_UNSUPPORTED_TYPES: Final = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


class GgufHeader(msgspec.Struct, frozen=True):
    """What stands before the tensors.

    Attributes:
        metadata: by key; None for arrays longer than `KEPT_ARRAY_LENGTH`.
    """

    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]


def is_gguf(path: Path) -> bool:
    """Whether the file starts with GGUF's magic."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor directory.

    Raises:
        ModelError: not GGUF, a version or tensor type that is not supported, or cut short.
    """
    if not is_gguf(path):
        msg = f"{path}: not a GGUF file (does not start with 'GGUF')"
        raise ModelError(msg)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            header = _Cursor(data, path).header()
        except (struct.error, UnicodeDecodeError) as error:
            msg = f"{path}: damaged GGUF header ({error}); download it again"
            raise ModelError(msg) from None
        size = len(data)
    for tensor in header.tensors:
        if tensor.offset + tensor.num_bytes > size:
            msg = (
                f"{path}: cut short: tensor {tensor.name} ends at byte "
                f"{tensor.offset + tensor.num_bytes} of {size}; download it again"
            )
            raise ModelError(msg)
    return header


class _Cursor:
    """Reads the header from front to back."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = len(MAGIC)

    def header(self) -> GgufHeader:
        version = self._take("<I")
        if version not in (2, 3):
            msg = f"{self._path}: GGUF version {version}; versions 2 and 3 are supported"
            raise ModelError(msg)
        num_tensors, num_keys = self._take("<Q"), self._take("<Q")
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._take("<I"))
        directory = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        assert isinstance(alignment, int)
        start = -(-self._at // alignment) * alignment
        tensors = tuple(
            msgspec.structs.replace(tensor, offset=start + tensor.offset) for tensor in directory
        )
        return GgufHeader(metadata, tensors)

    def _take(self, code: str) -> int:
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._take("<Q")
        raw = self._data[self._at : self._at + length]
        if len(raw) < length:
            msg = "a text ends beyond the file"
            raise struct.error(msg)
        self._at += length
        return raw.decode()

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._take("<I"), self._take("<Q")
            if length <= KEPT_ARRAY_LENGTH:
                return [self._value(item_kind) for _ in range(length)]
            self._skip(item_kind, length)
            return None
        if kind not in _SCALARS:
            msg = f"{self._path}: metadata of unknown type {kind}; is the file damaged?"
            raise ModelError(msg)
        return self._take(_SCALARS[kind])

    def _skip(self, item_kind: int, length: int) -> None:
        if item_kind in _SCALARS:
            self._at += length * struct.calcsize(_SCALARS[item_kind])
        elif item_kind == _STRING:
            unpack, data, at = struct.Struct("<Q").unpack_from, self._data, self._at
            for _ in range(length):
                at += 8 + unpack(data, at)[0]
            self._at = at
        else:
            msg = f"{self._path}: a long array of arrays in the metadata is not supported"
            raise ModelError(msg)

    def _tensor(self) -> TensorInfo:
        name = self._string()
        dims = [self._take("<Q") for _ in range(self._take("<I"))]
        kind, offset = self._take("<I"), self._take("<Q")
        if kind not in TENSOR_TYPES:
            found = _UNSUPPORTED_TYPES.get(kind, f"type {kind}")
            supported = ", ".join(sorted(name for name, _, _ in TENSOR_TYPES.values()))
            msg = f"{self._path}: tensor {name} is {found}; supported types are {supported}"
            raise ModelError(msg)
        dtype, block, block_bytes = TENSOR_TYPES[kind]
        if dims and dims[0] % block:
            msg = f"{self._path}: tensor {name}: rows of {dims[0]} are no whole {dtype} blocks"
            raise ModelError(msg)
        return TensorInfo(
            name, dtype, tuple(reversed(dims)), offset, math.prod(dims) // block * block_bytes
        )
