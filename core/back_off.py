"""Growing waits with jitter, so that many processes do not come back at one moment. Pure."""

from __future__ import annotations

from typing import Protocol


class Dice(Protocol):
    """The one method of `random.Random` that jitter needs."""

    def random(self) -> float:
        """Return a number in [0, 1)."""
        ...


class BackOff:
    """Waits that double from `first_s` to `limit_s`; each is drawn from its upper half.

    Args:
        rng: draws the jitter.
        first_s: the longest first wait, in seconds.
        limit_s: what no wait exceeds, in seconds.
    """

    def __init__(self, rng: Dice, *, first_s: float, limit_s: float) -> None:
        self._rng = rng
        self._first_s = min(first_s, limit_s)
        self._limit_s = limit_s
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Return how many seconds to wait now."""
        wait_s = self._next_s * (1.0 - 0.5 * self._rng.random())
        self._next_s = min(2 * self._next_s, self._limit_s)
        return wait_s

    def reset(self) -> None:
        """Begin anew: it worked."""
        self._next_s = self._first_s
