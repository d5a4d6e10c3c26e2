"""Growing waits with jitter, so that many processes do not come back at one moment."""

from __future__ import annotations

from random import Random


class BackOff:
    """Waits that double from `first_s` to `limit_s`; each is drawn from its upper half."""

    def __init__(self, rng: Random, *, first_s: float, limit_s: float) -> None:
        self._rng = rng
        self._first_s = first_s
        self._limit_s = limit_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Return how many seconds to wait now."""
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._limit_s)
        return wait_s

    def reset(self) -> None:
        """Begin anew: it worked."""
        self._next_s = self._first_s
