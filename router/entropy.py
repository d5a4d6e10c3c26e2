"""The system's randomness, taken in large pieces: a request needs a little of it four times (name,
seed, two dice), and each system call costs a microsecond."""

from __future__ import annotations

import os

_PIECE_BYTES = 4096
_MANTISSA_BITS = 53


class Entropy:
    """Implements `core.back_off.Dice`. As unpredictable as `os.urandom`; for one thread, and not to
    be carried over a fork."""

    __slots__ = ("_at", "_piece")

    def __init__(self) -> None:
        self._piece = b""
        self._at = 0

    def take(self, num_bytes: int) -> bytes:
        """Return random bytes, at most 4,096."""
        end = self._at + num_bytes
        if end > len(self._piece):
            self._piece = os.urandom(_PIECE_BYTES)
            self._at, end = 0, num_bytes
        taken = self._piece[self._at : end]
        self._at = end
        return taken

    def bits64(self) -> int:
        """Return 64 random bits."""
        return int.from_bytes(self.take(8), "little")

    def random(self) -> float:
        """Return a number in [0, 1), as `random.random` does."""
        return (self.bits64() >> 64 - _MANTISSA_BITS) * 2.0**-_MANTISSA_BITS
