"""Times at which timers that need not be exact fall together. Pure."""

from __future__ import annotations

import math


def next_multiple(period_s: float, now: float) -> float:
    """Return the first multiple of a period after `now`.

    Timers that may come a little early or late take such times: they fall together within a process
    and, since Linux's monotonic clock is the machine's, with those of other processes there, so
    that idle processes wake once for many purposes.
    """
    return (math.floor(now / period_s) + 1) * period_s
