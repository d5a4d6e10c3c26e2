"""Growing waits with jitter, so that many processes do not come back at one moment. Pure."""

from __future__ import annotations

from typing import Protocol


class Dice(Protocol):
    """The one method of `random.Random` that decisions need."""

    def random(self) -> float:
        """Return a number in [0, 1)."""
        ...


class BackOff:
    """Waits that double from `first_s` to `limit_s`; each is drawn from its upper half.

    Args:
        first_s: the longest first wait, in seconds.
        limit_s: what no wait exceeds, in seconds.
    """

    __slots__ = ("_first_s", "_limit_s", "_next_s")

    def __init__(self, *, first_s: float, limit_s: float) -> None:
        self._first_s = min(first_s, limit_s)
        self._limit_s = limit_s
        self._next_s = self._first_s

    def next_s(self, rng: Dice) -> float:
        """Return how many seconds to wait now."""
        wait_s = self._next_s * (1.0 - 0.5 * rng.random())
        self._next_s = min(2 * self._next_s, self._limit_s)
        return wait_s

    def reset(self) -> None:
        """Begin anew: it worked."""
        self._next_s = self._first_s
