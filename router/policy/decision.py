"""What the policy answers: where a request runs and why, or why nowhere."""

from __future__ import annotations

import enum

import msgspec

from core.ids import WorkerId
from core.messages import PrefillCandidate


class Reason(enum.StrEnum):
    """Why a request goes this way; label of the decisions counter."""

    DISAGGREGATED = "disaggregated"
    """A prefill worker computes the prompt: the cheapest pair."""

    ALWAYS = "always"
    """The same, because the request's header said so."""

    LOCAL_HIT = "local_hit"
    """The decode worker holds every reusable block; should the ledger be wrong, candidates
    follow."""

    LOCAL = "local"
    """The decode worker computes the few uncached tokens itself: cheaper than a handoff."""

    NEVER = "never"
    """The same, because the request's header said so."""

    FALLBACK = "fallback"
    """The same, because no prefill worker can be asked."""

    COLOCATED = "colocated"
    """A worker of role both serves it alone."""

    @property
    def is_handoff(self) -> bool:
        """Whether KV is expected to move."""
        return self in _HANDOFFS


_HANDOFFS = (Reason.DISAGGREGATED, Reason.ALWAYS)


class RefusalReason(enum.StrEnum):
    """Why no worker was chosen."""

    NO_WORKER = "no_worker"
    """No decode-capable worker lives."""

    NO_PREFILL_WORKER = "no_prefill_worker"
    """The request must be disaggregated, and no prefill worker can be asked."""

    TOO_LONG = "too_long"
    """No live worker can ever hold it."""

    AVOIDED = "avoided"
    """All that could serve it were to be avoided: they refused or failed it a moment ago."""


class Refusal(msgspec.Struct, frozen=True):
    """No worker now."""

    reason: RefusalReason


class Decision(msgspec.Struct, frozen=True):
    """Where a request runs.

    Attributes:
        worker_id: the decode worker, or the one of role both.
        candidates: prefill workers for the decode worker to ask in turn, best first.
        allow_local: whether the decode worker may compute the prompt once none is left.
        predicted_ttft_s, predicted_tpot_s: calibrated.
        raw_ttft_s, raw_tpot_s: as the cost model has them, to calibrate with.
        prefill_tokens: uncached prompt tokens that the first candidate (or the worker itself) will
            compute.
    """

    worker_id: WorkerId
    candidates: tuple[PrefillCandidate, ...]
    allow_local: bool
    reason: Reason
    predicted_ttft_s: float
    predicted_tpot_s: float
    raw_ttft_s: float
    raw_tpot_s: float
    prefill_tokens: int
