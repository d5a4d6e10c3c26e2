"""The headers of a safetensors checkpoint, one file or shards under an index.

Format: https://huggingface.co/docs/safetensors: 8 bytes header length, JSON header, data.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from core.errors import ModelError
from engine.models.fingerprint import TensorInfo

SUPPORTED_DTYPES = ("BF16", "F16", "F32")
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def shard_paths(directory: Path) -> list[Path]:
    """Return the checkpoint's files, in the order of their names.

    Raises:
        ModelError: there are none, or the index names a missing one.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.DecodeError as error:
            msg = f"{index}: not an index of safetensors shards ({error})"
            raise ModelError(msg) from None
        paths = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        paths = [directory / "model.safetensors"]
    for path in paths:
        if not path.is_file():
            msg = f"{path}: missing; a model directory holds model.safetensors or indexed shards"
            raise ModelError(msg)
    return paths


def read_tensors(path: Path) -> list[TensorInfo]:
    """Return one file's tensor directory.

    Raises:
        ModelError: not safetensors, cut short, or an element type that is not supported.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            msg = f"{path}: not a safetensors file, or cut short; download it again"
            raise ModelError(msg)
        raw = file.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in header.items()}
    except msgspec.DecodeError as error:
        msg = f"{path}: damaged safetensors header ({error}); download it again"
        raise ModelError(msg) from None
    return [_tensor(path, size, 8 + length, name, entry) for name, entry in entries.items()]


def _tensor(path: Path, size: int, start: int, name: str, entry: _Entry) -> TensorInfo:
    begin, end = entry.data_offsets
    if entry.dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(SUPPORTED_DTYPES)
        msg = f"{path}: tensor {name} is {entry.dtype}; supported types are {supported}"
        raise ModelError(msg)
    if start + end > size:
        msg = f"{path}: cut short: tensor {name} ends at byte {start + end} of {size}"
        raise ModelError(msg)
    return TensorInfo(name, entry.dtype, tuple(entry.shape), start + begin, end - begin)
