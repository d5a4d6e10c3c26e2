"""The stamps of a request's life, and every time metric as a difference of two of them.

Stamps are monotonic seconds of the process that took them, so a duration is a difference of stamps
of **one** process; only durations cross processes, and the router composes them (DistServe, Zhong
et al. 2024, names the stages).

    router   ARRIVED -> DISPATCHED -> FIRST_TOKEN -> FINISHED
    decode   RECEIVED -> RESERVED -> ASKED -> FIRST_TOKEN_RECEIVED -> KV_COMPLETE -> JOINED
                                  '-> PREFILL_STARTED -> PREFILL_FINISHED   (computed here)
    prefill  ASK_RECEIVED -> PREFILL_STARTED -> PREFILL_FINISHED
"""

from __future__ import annotations

import enum

import msgspec


class Stamp(enum.StrEnum):
    """Points in a request's life, in the order in which they can happen within one process."""

    ARRIVED = "arrived"
    DISPATCHED = "dispatched"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a stamp, no secret
    FINISHED = "finished"

    RECEIVED = "received"
    RESERVED = "reserved"
    ASKED = "asked"
    FIRST_TOKEN_RECEIVED = "first_token_received"  # noqa: S105 - no password
    KV_COMPLETE = "kv_complete"
    JOINED = "joined"

    ASK_RECEIVED = "ask_received"
    PREFILL_STARTED = "prefill_started"
    PREFILL_FINISHED = "prefill_finished"


class Duration(enum.Enum):
    """Named durations: (from, to), both stamps of one process."""

    TTFT = (Stamp.ARRIVED, Stamp.FIRST_TOKEN)
    E2E = (Stamp.ARRIVED, Stamp.FINISHED)
    DECODE = (Stamp.FIRST_TOKEN, Stamp.FINISHED)
    ROUTER_QUEUE = (Stamp.ARRIVED, Stamp.DISPATCHED)
    RESERVATION_WAIT = (Stamp.RECEIVED, Stamp.RESERVED)
    PREFILL_ROUND_TRIP = (Stamp.ASKED, Stamp.FIRST_TOKEN_RECEIVED)
    EXPOSED_TRANSFER = (Stamp.FIRST_TOKEN_RECEIVED, Stamp.KV_COMPLETE)
    JOIN_WAIT = (Stamp.KV_COMPLETE, Stamp.JOINED)
    PREFILL_QUEUE = (Stamp.ASK_RECEIVED, Stamp.PREFILL_STARTED)
    PREFILL = (Stamp.PREFILL_STARTED, Stamp.PREFILL_FINISHED)


class Lifetime:
    """The stamps that one process took of one request."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at: dict[Stamp, float] = {}

    def stamp(self, what: Stamp, now: float) -> None:
        """Record the first time that `what` happened; later calls change nothing."""
        self._at.setdefault(what, now)

    def at(self, what: Stamp) -> float | None:
        """Return when `what` happened, in this process's monotonic seconds."""
        return self._at.get(what)

    def seconds(self, what: Duration) -> float | None:
        """Return a duration in seconds; None while one of its stamps is missing."""
        begins, ends = what._value_  # `value` is a Python function's call away
        start, end = self._at.get(begins), self._at.get(ends)
        return None if start is None or end is None else max(0.0, end - start)


class PrefillDecision(enum.StrEnum):
    """Where a request's prompt was computed, and why there."""

    DISAGGREGATED = "disaggregated"
    """By a prefill worker."""

    LOCAL = "local"
    """By the decode worker, as the router chose."""

    LOCAL_HIT = "local_hit"
    """By the decode worker, which held all reusable blocks."""

    FALLBACK = "fallback"
    """By the decode worker, since no prefill worker served it."""

    COLOCATED = "colocated"
    """By a worker of role both."""


class RequestTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request's path as its decode worker tells the router, with its first token; all
    durations in s.

    Attributes:
        decision: why it went this way.
        cached_tokens: prompt tokens that no worker computed, as of the request's first attempt:
            what that found in the cache of the worker that computes the prompt. A later one may
            find what the first computed, so where the first broke off before it said what it
            found, 0. With a worker that refused, or was not reached, nothing was attempted.
        prefill_queue_s: at the prefill worker; None where the decode worker computed the prompt,
            which waits for its blocks alone (`reservation_wait_s`).
        prefill_s: computing the prompt, wherever that was.
        blocks_reused_decode: prompt blocks found in the decode worker's cache.
        blocks_reused_prefill: prompt blocks found in the prefill worker's cache.
    """

    decode_worker: str
    decision: PrefillDecision
    prefill_worker: str | None = None
    attempt: int = 1
    cached_tokens: int = 0
    blocks_transferred: int = 0
    blocks_reused_prefill: int = 0
    blocks_reused_decode: int = 0
    bytes_transferred: int = 0
    reservation_wait_s: float | None = None
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    prefill_round_trip_s: float | None = None
    exposed_transfer_s: float | None = None
    join_wait_s: float | None = None
