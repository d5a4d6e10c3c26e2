"""A counter for what is counted with every request: an addition, no lock.

prometheus_client's takes a lock and half a dozen calls (a microsecond). All is counted on the event
loop's thread, and a scrape reads there too: it is then that prometheus_client's is told.
"""

from __future__ import annotations

from prometheus_client import Counter


class FastCounter:
    """One label combination of a counter. Whoever publishes that calls `settle` first."""

    __slots__ = ("_counter", "_num_untold")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._num_untold = 0

    def inc(self) -> None:
        """Count one."""
        self._num_untold += 1

    def settle(self) -> None:
        """Let prometheus_client know."""
        self._counter.inc(self._num_untold)
        self._num_untold = 0
