"""The clock protocol, its real implementation and one that only tests and simulations move."""

from __future__ import annotations

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
