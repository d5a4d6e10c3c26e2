"""Times at which timers that need not be exact fall together. Pure."""

from __future__ import annotations

import math

_TIMER_ROUNDING_S = 0.001
"""Event loops round timers to milliseconds: whoever wakes a moment early finds nothing due."""


def next_multiple(period_s: float, now: float) -> float:
    """Return the first multiple of a period after `now`.

    Timers that may come a little early or late take such times: they fall together within a process
    and, since Linux's monotonic clock is the machine's, with those of other processes there, so
    that idle processes wake once for many purposes.
    """
    return (math.floor(now / period_s) + 1) * period_s


def last_multiple(period_s: float, until: float) -> float:
    """Return the last multiple of a period that is not after `until`."""
    return math.floor(until / period_s) * period_s


def sleep_s(until: float, now: float) -> float:
    """Return how long to sleep so as not to wake before `until`."""
    return max(0.0, until - now) + _TIMER_ROUNDING_S
