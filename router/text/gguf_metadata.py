"""The key-value header of a GGUF file, and nothing else of it.

`gguf.GGUFReader` maps every tensor and builds a numpy array per string (2.6 s for a vocabulary of
49,152); the router needs the header alone, and its start-up is counted in milliseconds. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).

`engine.models.gguf_file` reads the same header for what stands here beside the vocabulary, and
steps over that: a router imports nothing of the engine.
"""

from __future__ import annotations

import struct
from pathlib import Path

from core.errors import ModelError

GgufValue = int | float | bool | str | list["GgufValue"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MIN_READ_BYTES = 1 << 22


def read_metadata(path: Path) -> dict[str, GgufValue]:
    """Return the metadata of a GGUF file by key.

    Raises:
        ModelError: not a GGUF file, another version or byte order, or cut short.
    """
    size = _MIN_READ_BYTES
    try:
        total = path.stat().st_size
        while True:
            with path.open("rb") as file:
                data = file.read(size)
            try:
                return _Cursor(data, path).metadata()
            except (struct.error, IndexError):
                if size >= total:
                    msg = f"{path}: the GGUF header is cut short; copy the file again"
                    raise ModelError(msg) from None
                size *= 4
    except OSError as error:
        msg = f"{path}: {error.strerror or error}"
        raise ModelError(msg) from None


class _Cursor:
    """Reads forward through the header; struct.error or IndexError where the bytes end."""

    def __init__(self, data: bytes, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def metadata(self) -> dict[str, GgufValue]:
        if self._data[:4] != _MAGIC:
            msg = f"{self._path}: not a GGUF file (it begins with {self._data[:4]!r})"
            raise ModelError(msg)
        self._at = 4
        version = self._unpack(_U32)
        if version not in _VERSIONS:
            msg = f"{self._path}: GGUF version {version}: must be 2 or 3, little-endian"
            raise ModelError(msg)
        self._at += 8  # number of tensors
        count = self._unpack(_U64)
        return {self._string(): self._value(self._unpack(_U32)) for _ in range(count)}

    def _unpack(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return value

    def _string(self) -> str:
        length = self._unpack(_U64)
        end = self._at + length
        if end > len(self._data):
            raise IndexError
        text = self._data[self._at : end].decode("utf-8", "replace")
        self._at = end
        return text

    def _value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        form = _SCALARS.get(kind)
        if form is None:
            msg = f"{self._path}: GGUF value type {kind} is unknown"
            raise ModelError(msg)
        return self._unpack(form)

    def _array(self) -> list[GgufValue]:
        kind = self._unpack(_U32)
        count = self._unpack(_U64)
        form = _SCALARS.get(kind)
        if form is None:
            return [self._value(kind) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{form.format[1:]}", self._data, self._at)
        self._at += form.size * count
        return list(values)
