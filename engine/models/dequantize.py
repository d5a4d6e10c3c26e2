"""GGUF tensor bytes -> float32, vectorized over blocks.

Block formats from ggml-quants.c, 32 elements each (the 256-element ones: `k_quants`). A block is
one or two f16 numbers, for 5 bits a word that holds the fifth bits, and the elements: for 4 and 5
bits element i is the low nibble of byte i, element i + 16 its high nibble.

    Q8_0, Q4_0, Q5_0   x = scale * (q - 0 | 8 | 16)
    Q4_1, Q5_1         x = scale * q + minimum

numpy takes a third of the time of the gguf package's own decoders on a whole model (0.4 against
1.1 s for SmolLM2), which every start would wait for; that package judges these in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.models.k_quants import q4_k, q5_k, q6_k

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_BLOCK: Final = 32


def dequantize(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Floats:
    """Return a new float32 array.

    Args:
        raw: the tensor's bytes, uint8 [num_bytes].
        dtype: one of `gguf_file.TENSOR_TYPES`' names.
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


def _q4_0(raw: Bytes) -> Floats:
    blocks = raw.view(np.dtype([("scale", "<f2"), ("q", "u1", (_BLOCK // 2,))]))
    values = _nibbles(blocks["q"])
    values -= 8
    values *= _column(blocks["scale"])
    return values


def _q4_1(raw: Bytes) -> Floats:
    fields = [("scale", "<f2"), ("minimum", "<f2"), ("q", "u1", (_BLOCK // 2,))]
    blocks = raw.view(np.dtype(fields))
    values = _nibbles(blocks["q"])
    values *= _column(blocks["scale"])
    values += _column(blocks["minimum"])
    return values


def _q5_0(raw: Bytes) -> Floats:
    fields = [("scale", "<f2"), ("high", "u1", (4,)), ("q", "u1", (_BLOCK // 2,))]
    blocks = raw.view(np.dtype(fields))
    values = _nibbles(blocks["q"])
    values += _fifth_bits(blocks["high"])
    values -= 16
    values *= _column(blocks["scale"])
    return values


def _q5_1(raw: Bytes) -> Floats:
    fields = [
        ("scale", "<f2"),
        ("minimum", "<f2"),
        ("high", "u1", (4,)),
        ("q", "u1", (_BLOCK // 2,)),
    ]
    blocks = raw.view(np.dtype(fields))
    values = _nibbles(blocks["q"])
    values += _fifth_bits(blocks["high"])
    values *= _column(blocks["scale"])
    values += _column(blocks["minimum"])
    return values


def _nibbles(packed: Bytes) -> Floats:
    """Return the elements of [blocks, 16] bytes, float32 [blocks, 32]."""
    values = np.empty((len(packed), _BLOCK), np.float32)
    values[:, : _BLOCK // 2] = packed & 15
    values[:, _BLOCK // 2 :] = packed >> 4
    return values


def _fifth_bits(high: Bytes) -> Bytes:
    """Return 16 where an element's bit is set in [blocks, 4] bytes, uint8 [blocks, 32]."""
    return np.unpackbits(high, axis=1, bitorder="little") * np.uint8(16)


def _column(halves: npt.NDArray[Any]) -> Floats:
    return halves.astype(np.float32)[:, None]


_DECODERS: Final[dict[str, Callable[[Bytes], Floats]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
