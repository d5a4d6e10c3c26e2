"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).

A pure function of a 128-bit counter and a 64-bit key: any word can be computed alone, by anyone.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_MASK: Final = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four words for each counter.

    torch has no unsigned 64-bit multiplication, but int64 wraps, so both words of a product are in
    its bits. Only what is multiplied next is masked to 32 bits; the rest may carry bits above them.

    Args:
        counter: int64 tensors of values from 0 to 2**32 - 1, low word first; shapes broadcast.
        key: likewise.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ k0).bitwise_and_(_MASK)
        c2 = ((product0 >> 32) ^ c3 ^ k1).bitwise_and_(_MASK)
        c1, c3 = product1, product0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK
