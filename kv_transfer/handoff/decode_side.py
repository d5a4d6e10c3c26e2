"""One request at the worker that receives its KV, from its first reservation to the join.

                       engine reserved blocks                 KV complete and first tokens known
    start -> QUEUED ----------------------------> RECEIVING ---------------------------------> ENDED
               ^  |  Ask to the next candidate        |                                  Join    ^
               |  |                                   |                                          |
               |  | found all reusable blocks here    | refused, failed, no progress for try_s,  |
               |  +-----------------> ENDED           | peer lost or suspect, region fenced      |
               |                                      v                                          |
               +----- Retry (attempt + 1) ---- candidates left? --- no ---> ComputeLocally, or --+
                      fresh blocks                    |                     Fail when strict
                      Settle + quarantine of the old  |
                                                      +-- nobody waits any more -> EndReservation

An attempt's blocks are writable by its peer from the ask until they joined, the peer settled, or a
fence passed. So whatever ends an attempt that was asked abandons its blocks to quarantine and then
says `Settle`, in this order: the answer may be known at once, and ends a quarantine that must have
begun. Only refused and never-sent asks leave their blocks `untouched`.

First tokens go to the client when they come, before or after the KV, and never change who owns a
block; a number of them other than one a sample fails the attempt. From then on every further
attempt carries them as forced outputs, so nobody samples that position again. When they end all
samples, the client has its answer, and the attempt merely runs out: the KV joins the cache when
complete, or is abandoned at the next trouble.

Messages of another attempt, boot or region generation than the current one change nothing.
"""

from __future__ import annotations

import enum
from typing import assert_never

import msgspec
from msgspec.structs import replace

from core.ids import Boot, HandoffId
from core.messages import (
    FirstTokens,
    HandoffFailed,
    HandoffRefused,
    PrefillCandidate,
    WriteNotification,
)
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from kv_transfer.handoff.arrivals import NOTHING_AWAITED, SINGLE_RANK, Arrivals, RankPair, awaiting
from kv_transfer.handoff.block_runs import block_runs
from kv_transfer.handoff.decode_messages import (
    Aborted,
    Ask,
    AskUndelivered,
    AttemptAlive,
    AttemptEnded,
    AttemptOutcome,
    BlocksReserved,
    ComputeLocally,
    Effect,
    EmitTokens,
    EndReservation,
    Event,
    Fail,
    FoundLocally,
    Join,
    PeerEvent,
    PeerLost,
    RegionRevoked,
    Retry,
    SampleAborted,
    Settle,
    Tick,
)


class Phase(enum.Enum):
    """Where the request stands on its way to the join."""

    QUEUED = "queued"
    RECEIVING = "receiving"
    ENDED = "ended"


class DecodeTerms(msgspec.Struct, frozen=True):
    """What does not change over a request's attempts.

    Attributes:
        boot: this process's.
        candidates: prefill workers in the order in which they are asked, at least one.
        allow_local: whether the prompt may be computed here once no candidate is left.
        deadline: of the request, in this process's monotonic seconds.
        try_s: seconds without progress after which the next candidate is asked. A prefill worker
            that says it has the attempt queued is progress; its silence is not.
    """

    boot: Boot
    block_size: int
    candidates: tuple[PrefillCandidate, ...]
    allow_local: bool
    deadline: float
    try_s: float
    rank_pairs: tuple[RankPair, ...] = SINGLE_RANK


class DecodeSide(msgspec.Struct, frozen=True):
    """The state. The second group of attributes belongs to the current attempt.

    Attributes:
        request: with the outputs that the current attempt forces.
        candidate_index: whom the current attempt asks; the number of candidates when none is left.
        repeated: whether the candidate is asked once more after a fabric error.
        ended: samples that their first token ended, or that the router aborted.

        arrivals: of the blocks that were asked for; nothing is awaited while QUEUED.
        first_tokens: as this attempt sampled them; empty until they come, and when forced.
    """

    terms: DecodeTerms
    request: EngineRequest
    handoff: HandoffId
    phase: Phase = Phase.QUEUED
    candidate_index: int = 0
    repeated: bool = False
    ended: frozenset[int] = frozenset()

    arrivals: Arrivals = NOTHING_AWAITED
    generation: int = -1
    progress_at: float = 0.0
    first_tokens: tuple[int, ...] = ()

    @property
    def candidate(self) -> PrefillCandidate:
        """Whom the current attempt asks."""
        return self.terms.candidates[self.candidate_index]

    @property
    def is_answered(self) -> bool:
        """Whether nobody waits for another token of this request."""
        return len(self.ended) == self.request.sampling.n

    @property
    def is_untouched(self) -> bool:
        """Whether nothing tells that the current attempt's peer has begun."""
        return not (self.first_tokens or self.arrivals.landed)

    @property
    def is_kv_complete(self) -> bool:
        """Whether every awaited block of the current attempt has landed."""
        return self.arrivals.is_complete


Step = tuple[DecodeSide, tuple[Effect, ...]]


class _End(msgspec.Struct, frozen=True):
    """Why an attempt ends, and whether its blocks were surely never written."""

    outcome: AttemptOutcome
    reason: str
    untouched: bool = False


def advance(state: DecodeSide, event: Event, now: float) -> Step:
    """Return the state after `event` at monotonic second `now`, and what is to be done, in order.

    An ended handoff ignores everything: its late messages concern the quarantine alone.
    """
    if state.phase is Phase.ENDED:
        return state, ()
    match event:
        case BlocksReserved():
            return _ask(state, event, now)
        case FoundLocally():
            return replace(state, phase=Phase.ENDED), ()
        case PeerLost():
            return _peer_lost(state, event)
        case RegionRevoked():
            return _revoked(state, event)
        case SampleAborted():
            return _sample_aborted(state, event)
        case Aborted():
            return _finish(state, _End(AttemptOutcome.ABORTED, "aborted by the router"))
        case Tick():
            return _tick(state, now)
        case _:
            return _peer_says(state, event, now)


def _peer_says(state: DecodeSide, event: PeerEvent, now: float) -> Step:
    if state.phase is not Phase.RECEIVING or event.handoff != state.handoff:
        return state, ()
    match event:
        case AttemptAlive():
            return replace(state, progress_at=now), ()
        case FirstTokens():
            return _tokens(state, event, now)
        case WriteNotification():
            return _landed(state, event, now)
        case HandoffRefused():
            reason = f"{event.reason}: {event.message}"
            return _next_candidate(state, _End(AttemptOutcome.REFUSED, reason, state.is_untouched))
        case AskUndelivered():
            end = _End(AttemptOutcome.UNDELIVERED, event.reason, untouched=True)
            return _next_candidate(state, end)
        case HandoffFailed():
            return _failed(state, event.message)
        case _:
            assert_never(event)


def _ask(state: DecodeSide, event: BlocksReserved, now: float) -> Step:
    if state.phase is not Phase.QUEUED or event.handoff != state.handoff:
        return state, ()
    ask = Ask(
        candidate=state.candidate,
        handoff=state.handoff,
        request=state.request.for_peer(),
        first_block=event.num_cached_blocks,
        blocks=block_runs(event.block_ids[event.num_cached_blocks :]),
        remaining_s=max(0.0, state.terms.deadline - now),
    )
    asked = replace(
        state,
        phase=Phase.RECEIVING,
        arrivals=awaiting(event.num_cached_blocks, len(event.block_ids), state.terms.rank_pairs),
        generation=event.generation,
        progress_at=now,
    )
    return asked, (ask,)


def _tokens(state: DecodeSide, message: FirstTokens, now: float) -> Step:
    state = replace(state, progress_at=now)
    if state.request.outputs or state.first_tokens:
        return state, ()  # forced, or said twice: nothing new for the client
    if not _is_one_a_sample(message, state.request.sampling):
        return _failed(state, "first tokens of another number than was asked for")
    samples = tuple(i for i in range(len(message.token_ids)) if i not in state.ended)
    over = {i for i, reason in enumerate(message.finish_reasons) if reason is not None}
    state = replace(state, first_tokens=message.token_ids, ended=state.ended | over)
    state, effects = _join_if_ready(state)
    return state, (EmitTokens(tokens=message, samples=samples), *effects)


def _is_one_a_sample(message: FirstTokens, sampling: SamplingParams) -> bool:
    counts = {len(message.token_ids), len(message.finish_reasons)}
    if sampling.logprobs is not None:
        counts.add(len(message.logprobs))
    return counts == {sampling.n}


def _landed(state: DecodeSide, write: WriteNotification, now: float) -> Step:
    is_current = (
        write.source == state.candidate.boot
        and write.target == state.terms.boot
        and write.generation == state.generation
    )
    if not is_current:
        return state, ()
    arrivals = state.arrivals.add(write.rank_pair, write.first_block, write.num_blocks)
    return _join_if_ready(replace(state, arrivals=arrivals, progress_at=now))


def _join_if_ready(state: DecodeSide) -> Step:
    knows_tokens = bool(state.first_tokens or state.request.outputs)
    if not (knows_tokens and state.is_kv_complete):
        return state, ()
    received_from = state.arrivals.first * state.terms.block_size
    join = Join(
        handoff=state.handoff,
        first_tokens=state.first_tokens,
        num_received=max(0, len(state.request.prompt) - received_from),
    )
    completed = AttemptEnded(state.handoff, AttemptOutcome.COMPLETED, "")
    return replace(state, phase=Phase.ENDED), (join, completed)


def _failed(state: DecodeSide, reason: str) -> Step:
    """Ask the same worker once more (it makes a fresh connection), then the next."""
    end = _End(AttemptOutcome.FAILED, reason)
    if state.repeated:
        return _next_candidate(state, end)
    return _another_attempt(state, end, state.candidate_index, repeated=True)


def _peer_lost(state: DecodeSide, event: PeerLost) -> Step:
    if state.phase is not Phase.RECEIVING or event.boot != state.candidate.boot:
        return state, ()
    return _next_candidate(state, _End(AttemptOutcome.PEER_LOST, event.reason))


def _revoked(state: DecodeSide, event: RegionRevoked) -> Step:
    """A fence loses writes under way. KV that has landed moves with the memory."""
    is_hit = state.phase is Phase.RECEIVING and state.generation <= event.generation
    if not is_hit or state.is_kv_complete:
        return state, ()
    end = _End(AttemptOutcome.REVOKED, "region fenced")
    return _another_attempt(state, end, state.candidate_index, repeated=state.repeated)


def _sample_aborted(state: DecodeSide, event: SampleAborted) -> Step:
    state = replace(state, ended=state.ended | {event.sample_index})
    if state.is_answered and not state.first_tokens:
        return _finish(state, _End(AttemptOutcome.ABORTED, "every sample aborted by the router"))
    return state, ()


def _tick(state: DecodeSide, now: float) -> Step:
    if now >= state.terms.deadline:
        reason = "the request's time is over"
        ended, effects = _finish(state, _End(AttemptOutcome.TIMED_OUT, reason))
        failed = () if state.is_answered else (Fail(reason, retriable=False),)
        return ended, (*effects, *failed)
    if state.phase is Phase.RECEIVING and now >= state.progress_at + state.terms.try_s:
        reason = f"no progress for {state.terms.try_s} s"
        return _next_candidate(state, _End(AttemptOutcome.TIMED_OUT, reason))
    return state, ()


def _next_candidate(state: DecodeSide, end: _End) -> Step:
    following = state.candidate_index + 1
    if state.is_answered or following < len(state.terms.candidates):
        return _another_attempt(state, end, following, repeated=False)
    if state.terms.allow_local:
        local = ComputeLocally(state.handoff, _forcing(state), end.untouched)
        return replace(state, phase=Phase.ENDED), _abandon(state, end, local)
    ended, effects = _finish(state, end)
    message = f"no prefill worker could serve it; the last: {end.reason}"
    return ended, (*effects, Fail(message, retriable=True))


def _another_attempt(state: DecodeSide, end: _End, candidate_index: int, *, repeated: bool) -> Step:
    if state.is_answered:
        return _finish(state, end)
    successor = HandoffId(state.handoff.request_id, state.handoff.attempt.next_trial())
    request = _forcing(state)
    queued = DecodeSide(
        terms=state.terms,
        request=request,
        handoff=successor,
        candidate_index=candidate_index,
        repeated=repeated,
        ended=state.ended,
    )
    retry = Retry(state.handoff, successor, request, end.untouched)
    return queued, _abandon(state, end, retry)


def _finish(state: DecodeSide, end: _End) -> Step:
    """End the request here. Without an ask nothing can have been written."""
    untouched = end.untouched or state.phase is Phase.QUEUED
    answered = bool(state.first_tokens or state.request.outputs)
    effects = _abandon(state, end, EndReservation(state.handoff, untouched, answered))
    return replace(state, phase=Phase.ENDED), effects


def _abandon(
    state: DecodeSide, end: _End, blocks: Retry | ComputeLocally | EndReservation
) -> tuple[Effect, ...]:
    """Do with the attempt's blocks what `blocks` says, and settle what may still be written."""
    if state.phase is Phase.QUEUED:
        return (blocks,)
    counted = AttemptEnded(state.handoff, end.outcome, end.reason)
    if end.untouched:
        return (counted, blocks)
    return (counted, blocks, Settle(state.candidate, state.handoff, state.generation))


def _forcing(state: DecodeSide) -> EngineRequest:
    """Return the request with the tokens that were emitted as forced outputs."""
    if not state.first_tokens:
        return state.request
    return replace(state.request, outputs=tuple((token,) for token in state.first_tokens))
