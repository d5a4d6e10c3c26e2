"""When an end of a stream says that it lives. Pure: time is an argument.

The worker's end sets the pace. The opener answers what it hears, in the same wake-up, so that an
idle stream wakes each side once a period. Due times are multiples of the period on the machine's
monotonic clock: those of all streams, and of all workers of a machine, fall together, and a router
wakes once for all of them.
"""

from __future__ import annotations

import math

from core.shared_ticks import next_multiple

_RECENT_SHARE = 0.25
"""Of a period: what left so shortly before a heartbeat is due stands for it."""

_ANSWER_SHARE = 0.5
"""Of a period: an opener that hears tokens does not answer each of them."""


class Beats:
    """One end's heartbeats.

    The peer hears at most 1.25 periods of silence, of a period that is twice heartbeat_s, or half
    of suspect_s where that is less, and never below heartbeat_s.

    Args:
        answers: this is the opener's end.
    """

    def __init__(self, *, answers: bool, heartbeat_s: float, suspect_s: float, now: float) -> None:
        self._period_s = max(heartbeat_s, min(2 * heartbeat_s, suspect_s / 2))
        self._answers = answers
        self._sent_at = now
        self.due_at = math.inf if answers else next_multiple(self._period_s, now)
        """When to ask `take_due`."""

    def sent(self, now: float) -> None:
        """A frame left."""
        self._sent_at = now

    def take_due(self, now: float) -> bool:
        """Return whether to send a heartbeat now, and set the next one's time."""
        if now < self.due_at:
            return False
        self.due_at = next_multiple(self._period_s, now)
        return now - self._sent_at >= _RECENT_SHARE * self._period_s

    def is_answer_due(self, now: float) -> bool:
        """Return whether to send a heartbeat because the peer was heard now."""
        return self._answers and now - self._sent_at >= _ANSWER_SHARE * self._period_s
