"""The K formats of ggml-quants.c: superblocks of 256 elements -> float32.

    Q4_K, Q5_K   8 groups of 32:  x = (scale * s) * q - (min_scale * m)    s, m of 6 bits
    Q6_K         16 groups of 16: x = (scale * s) * (q - 32)               s of 8 bits, signed

Each formula is evaluated in float32 in ggml's order, so that results are equal to the bit.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_SUPERBLOCK: Final = 256
_GROUPS: Final = 8
_HEAD: Final = [("scale", "<f2"), ("min_scale", "<f2"), ("scales", "u1", (12,))]
_Q4_K: Final = np.dtype([*_HEAD, ("low", "u1", (128,))])
_Q5_K: Final = np.dtype([*_HEAD, ("high", "u1", (32,)), ("low", "u1", (128,))])
_Q6_K: Final = np.dtype(
    [("low", "u1", (128,)), ("high", "u1", (64,)), ("scales", "i1", (16,)), ("scale", "<f2")]
)


def q4_k(raw: Bytes) -> Floats:
    """Decode uint8 [superblocks * 144] to [superblocks, 256]."""
    blocks = raw.view(_Q4_K)
    return _scaled(blocks, _groups_of_nibbles(blocks["low"]))


def q5_k(raw: Bytes) -> Floats:
    """Decode uint8 [superblocks * 176] to [superblocks, 256]."""
    blocks = raw.view(_Q5_K)
    elements = _groups_of_nibbles(blocks["low"])
    high = blocks["high"]
    for group in range(_GROUPS):  # bit `group` of byte i belongs to element i of the group
        elements[:, group] |= (high >> group & 1) << 4
    return _scaled(blocks, elements)


def q6_k(raw: Bytes) -> Floats:
    """Decode uint8 [superblocks * 210] to [superblocks, 256].

    Each half of a superblock is four rows of 32: two from the low nibbles of 64 bytes, two from
    their high ones; two bits a row more come from each of 32 bytes.
    """
    blocks = raw.view(_Q6_K)
    low, high = blocks["low"].reshape(-1, 2, 2, 32), blocks["high"].reshape(-1, 2, 32)
    elements = np.empty((len(blocks), 2, 4, 32), np.int8)
    for row in range(4):
        nibbles = low[:, :, row % 2] >> 4 * (row // 2) & 15
        elements[:, :, row] = nibbles | (high >> 2 * row & 3) << 4
    elements -= 32
    scales = blocks["scales"].astype(np.float32)
    scales *= _column(blocks["scale"])
    values = elements.reshape(-1, 16, 16).astype(np.float32)
    values *= scales[..., None]
    return values.reshape(-1, _SUPERBLOCK)


def _groups_of_nibbles(low: Bytes) -> Bytes:
    """Return the elements of [superblocks, 128] bytes, uint8 [superblocks, 8, 32].

    32 bytes hold two groups: the low nibbles, then the high ones.
    """
    pairs = low.reshape(-1, _GROUPS // 2, 32)
    elements = np.empty((len(low), _GROUPS // 2, 2, 32), np.uint8)
    elements[:, :, 0] = pairs & 15
    elements[:, :, 1] = pairs >> 4
    return elements.reshape(-1, _GROUPS, 32)


def _scaled(blocks: npt.NDArray[Any], elements: Bytes) -> Floats:
    """Apply scales and minima to elements [superblocks, 8, 32]; return [superblocks, 256].

    Of 12 bytes, the first four hold scales 0 to 3 in their low six bits, the next four minima 0 to
    3; the last four hold the low nibbles of scales 4 to 7 and, above them, of minima 4 to 7, whose
    upper two bits are those that the first eight bytes have left.
    """
    first, second, third = (blocks["scales"][:, at : at + 4] for at in (0, 4, 8))
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1).astype(np.float32)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    scales *= _column(blocks["scale"])
    values = elements.astype(np.float32)
    values *= scales[..., None]
    values -= (minima.astype(np.float32) * _column(blocks["min_scale"]))[..., None]
    return values.reshape(-1, _SUPERBLOCK)


def _column(halves: npt.NDArray[Any]) -> Floats:
    return halves.astype(np.float32)[:, None]
