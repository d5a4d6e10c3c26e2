"""How many sequences lost their blocks on a worker lately: it has less room than it shows."""

from __future__ import annotations

HALF_LIFE_S = 5.0
"""After so long a preemption counts half: about what the sequences around it take to end."""


class RecentPreemptions:
    """A decaying count, from totals told with each load."""

    __slots__ = ("_count", "_told_at", "_total")

    def __init__(self) -> None:
        self._count = 0.0
        self._total: int | None = None
        self._told_at = 0.0

    @property
    def count(self) -> float:
        """As of the last load."""
        return self._count

    def told(self, total: int, now: float) -> None:
        """Take a total since boot; what was before the first one is not recent."""
        if self._total is not None:
            self._count *= 0.5 ** ((now - self._told_at) / HALF_LIFE_S)
            self._count += max(0, total - self._total)
        self._total, self._told_at = total, now
