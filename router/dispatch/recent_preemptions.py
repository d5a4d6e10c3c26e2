"""How many sequences lost their blocks on a worker lately: it has less room than it shows."""

from __future__ import annotations

HALF_LIFE_S = 5.0
"""After so long a preemption counts half: about what the sequences around it take to end."""


class RecentPreemptions:
    """A decaying count, from totals told with each load, and from records in etcd."""

    __slots__ = ("_as_of", "_count", "_total")

    def __init__(self) -> None:
        self._count = 0.0
        self._total: int | None = None
        self._as_of = 0.0

    @property
    def count(self) -> float:
        """As of the last news."""
        return self._count

    def told(self, total: int, now: float) -> None:
        """Take a total since boot; what was before the first one is not recent."""
        self._decay(now)
        if self._total is not None:
            self._count += max(0, total - self._total)
        self._total = total

    def recorded(self, num_preempted: int, now: float) -> None:
        """Take how many have no blocks now: some may have lost them before anything was told."""
        self._decay(now)
        self._count = max(self._count, num_preempted)

    def _decay(self, now: float) -> None:
        self._count *= 0.5 ** ((now - self._as_of) / HALF_LIFE_S)
        self._as_of = now
