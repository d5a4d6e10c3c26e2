"""The clock protocol, its real implementation and one that only tests and simulations move."""

from __future__ import annotations

import math
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds; comparable within one process only."""

    def now(self) -> float:
        """Return monotonic seconds."""
        ...

    def wall(self) -> float:
        """Return seconds since the epoch, for logs and the API's `created` only."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return time.time()


class ManualClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the seconds reached so far."""
        return self._now

    def wall(self) -> float:
        """Return the same seconds; a simulation has no other epoch."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: `seconds` is negative; monotonic clocks do not go back.
        """
        if seconds < 0:
            msg = f"advance({seconds}): a monotonic clock does not go back"
            raise ValueError(msg)
        self._now += seconds


def next_multiple(period_s: float, now: float) -> float:
    """Return the first multiple of a period after `now`.

    Timers that may come a little early or late take such times: they fall together within a process
    and, since Linux's monotonic clock is the machine's, with those of other processes there, so
    that idle processes wake once for many purposes.
    """
    return (math.floor(now / period_s) + 1) * period_s
