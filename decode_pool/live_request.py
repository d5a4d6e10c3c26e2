"""One request that this worker owns, and the path that it took."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from control_plane.rpc.interface import Stream
from core.ids import Boot, RequestId
from core.lifetime import Duration, Lifetime, PrefillDecision, RequestTrace, Stamp
from core.messages import FirstTokens, PrefillAsk, StartRequest
from kv_transfer.handoff.decode_side import DecodeSide, Phase


class RequestState(enum.StrEnum):
    """Where a request stands. Each has a deadline: the request's, and while RECEIVING or SETTLING
    the attempt's too.

    WAITING     for blocks
    RECEIVING   blocks reserved, KV on its way
    RUNNING     the engine computes its tokens
    SETTLING    every sample has ended; its KV is still on its way
    """

    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    SETTLING = "settling"


@dataclass(slots=True)
class TracePath:
    """What a request's trace is made of, as far as it is known.

    Attributes:
        cached_tokens: see `RequestTrace`; None until the first attempt said or broke off.
        blocks_asked: blocks that the current attempt brings.
    """

    decision: PrefillDecision
    prefill_worker: str | None = None
    trial: int = 1
    cached_tokens: int | None = None
    blocks_asked: int = 0
    blocks_reused_decode: int = 0
    first_tokens: FirstTokens | None = None

    def found_cached(self, num_tokens: int) -> None:
        """Remember what the first attempt found; a later one may find what the first computed."""
        if self.cached_tokens is None:
            self.cached_tokens = num_tokens

    def attempt_lost(self) -> None:
        """An attempt that may have computed broke off; what it had found is not known any more."""
        self.found_cached(0)

    def computed_here(self, decision: PrefillDecision) -> None:
        """The prompt is computed here after all."""
        self.decision = decision
        self.prefill_worker = None
        self.blocks_asked = 0
        self.first_tokens = None


@dataclass(slots=True)
class LiveRequest:
    """A request from `StartRequest` to its last token, and until its blocks are settled.

    Attributes:
        stream: of the router that sent it.
        engine_id: its name in the engine; a new dispatch may come while the engine still ends the
            one before.
        side: the handoff; None for requests that never had a prefill candidate.
        next_index: per sample, the index of the next token to send.
        next_scored: the prompt token whose log-probability is to be sent next.
        reported: the trace as the router knows it.
        is_preempted: a sample lost its blocks, and no token came since.
        asked, asked_of: the last ask, and the life of the worker that it went to.
    """

    start: StartRequest
    stream: Stream[Any]
    engine_id: RequestId
    deadline: float
    path: TracePath
    next_index: list[int]
    next_scored: int = 1
    side: DecodeSide | None = None
    state: RequestState = RequestState.WAITING
    lifetime: Lifetime = field(default_factory=Lifetime)
    finished: set[int] = field(default_factory=set)
    reported: RequestTrace | None = None
    is_preempted: bool = False
    asked: PrefillAsk | None = None
    asked_of: Boot | None = None

    @property
    def request_id(self) -> RequestId:
        """The router's name of it."""
        return self.start.request.request_id

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return len(self.finished) == self.start.request.sampling.n

    @property
    def unfinished(self) -> set[int]:
        """Samples that have not ended."""
        return set(range(self.start.request.sampling.n)) - self.finished

    @property
    def is_handing_off(self) -> bool:
        """Whether its handoff is not over."""
        return self.side is not None and self.side.phase is not Phase.ENDED

    @property
    def has_kv(self) -> bool:
        """Whether the KV of its prompt is whole, and here."""
        stamps = (Stamp.JOINED, Stamp.PREFILL_FINISHED)
        return self.state is RequestState.RUNNING and any(map(self.lifetime.at, stamps))

    def trace(self, worker: str, block_size: int, block_bytes: int) -> RequestTrace:
        """Return the path so far."""
        path, lifetime = self.path, self.lifetime
        tokens = path.first_tokens
        reused = 0 if tokens is None else tokens.cached_tokens // block_size
        return RequestTrace(
            decode_worker=worker,
            decision=path.decision,
            prefill_worker=path.prefill_worker,
            attempt=path.trial,
            cached_tokens=path.cached_tokens or 0,
            blocks_transferred=path.blocks_asked,
            blocks_reused_prefill=reused,
            blocks_reused_decode=path.blocks_reused_decode,
            bytes_transferred=path.blocks_asked * block_bytes,
            reservation_wait_s=lifetime.seconds(Duration.RESERVATION_WAIT),
            prefill_queue_s=None if tokens is None else tokens.queue_s,
            prefill_s=lifetime.seconds(Duration.PREFILL) if tokens is None else tokens.prefill_s,
            prefill_round_trip_s=lifetime.seconds(Duration.PREFILL_ROUND_TRIP),
            exposed_transfer_s=lifetime.seconds(Duration.EXPOSED_TRANSFER),
            join_wait_s=lifetime.seconds(Duration.JOIN_WAIT),
        )


def engine_id_of(start: StartRequest) -> RequestId:
    """Return the request's name in the engine."""
    return RequestId(f"{start.request.request_id}/{start.dispatch}")
