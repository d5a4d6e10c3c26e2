"""GGUF tensor bytes -> float32, vectorized over blocks.

Block formats from ggml-quants.c, 32 elements each: Q8_0 is (f16 scale, 32 x int8), x = scale * q;
Q4_1 is (f16 scale, f16 minimum, 16 bytes), x = scale * q + minimum, element i in the low nibble of
byte i and element i + 16 in its high nibble.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_BLOCK: Final = 32


def dequantize(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Floats:
    """Return a new float32 array.

    Args:
        raw: the tensor's bytes, uint8 [num_bytes].
        dtype: "F32", "F16", "BF16", "Q8_0" or "Q4_1".
        shape: rows first.
    """
    return _DECODERS[dtype](raw).reshape(shape)


def _f32(raw: Bytes) -> Floats:
    return raw.view("<f4").astype(np.float32, copy=True)


def _f16(raw: Bytes) -> Floats:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: Bytes) -> Floats:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(raw: Bytes) -> Floats:
    blocks = raw.view(np.dtype([("scale", "<f2"), ("q", "i1", (_BLOCK,))]))
    values = blocks["q"].astype(np.float32)
    values *= _column(blocks["scale"])
    return values


def _q4_1(raw: Bytes) -> Floats:
    fields = [("scale", "<f2"), ("minimum", "<f2"), ("q", "u1", (_BLOCK // 2,))]
    blocks = raw.view(np.dtype(fields))
    values = np.empty((len(blocks), _BLOCK), np.float32)
    values[:, : _BLOCK // 2] = blocks["q"] & 15
    values[:, _BLOCK // 2 :] = blocks["q"] >> 4
    values *= _column(blocks["scale"])
    values += _column(blocks["minimum"])
    return values


def _column(halves: npt.NDArray[Any]) -> Floats:
    return halves.astype(np.float32)[:, None]


_DECODERS: Final[dict[str, Callable[[Bytes], Floats]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_1": _q4_1,
}
