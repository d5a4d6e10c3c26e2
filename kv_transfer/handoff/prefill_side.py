"""One attempt at the worker that computes the prompt and pushes its KV.

    ask -> (checked) -> QUEUED -> admitted -> COMPUTING -> prompt done, tokens told -> COMPUTED
             |                      |  each chunk: Push what is final and was not pushed    |
             v                      v                                                       |
          refused    settle, stream lost, deadline, write FAILED, refused or stuck          |
                                    v                                                       v
                                 STOPPING: no new write, wait for the posted ones        all DONE
                                    |                                                       |
                                    | all DONE: Release, answer `HandoffSettled`            v
                                    +------------------------------------------------->   OVER
                                      one FAILED: hold the blocks until the agent is
                                      destroyed, and never answer

Source blocks are let go of only when every write that was posted is DONE, or the agent that could
read them is destroyed. A settle is answered only when every write is DONE: FAILED says nothing
about what still lands at the target.
"""

from __future__ import annotations

import enum
from typing import assert_never

import msgspec
from msgspec.structs import replace

from core.ids import BlockId
from core.kv_layout import summary_difference
from core.lifetime import Duration, Lifetime, Stamp
from core.messages import (
    FirstTokens,
    HandoffFailed,
    HandoffRefused,
    HandoffSettled,
    PrefillAsk,
    RegionDescriptor,
)
from core.request import TokenLogprobs
from core.request_slips import slip_of
from kv_transfer.handoff.block_runs import block_ids_of
from kv_transfer.handoff.prefill_messages import (
    AgentDestroyed,
    AttemptOutcome,
    ChunkComputed,
    Compute,
    DecodeLost,
    Effect,
    EngineRefused,
    Event,
    Forget,
    PromptAdmitted,
    Push,
    Release,
    SettleRequested,
    StopComputing,
    Tell,
    Tick,
    TokenSampled,
    WriteDone,
    WriteFailed,
    WriteRefused,
)


class Stage(enum.Enum):
    """Where the attempt stands."""

    QUEUED = "queued"
    COMPUTING = "computing"
    COMPUTED = "computed"
    STOPPING = "stopping"
    OVER = "over"


class PrefillTerms(msgspec.Struct, frozen=True):
    """What this worker offers.

    Attributes:
        layout: summary of this pool's layout.
        try_s: seconds in which at least one of an attempt's posted writes must end: the target of
            one that does not may be frozen, and a frozen peer's writes stay pending for ever.
        refusing: why no new ask is taken ("draining", "wrong_role"), or empty.
    """

    layout: str
    block_size: int
    block_bytes: int
    try_s: float
    refusing: str = ""


class PrefillSide(msgspec.Struct, frozen=True):
    """The state.

    Attributes:
        asked_at, started_at, computed_at: monotonic seconds, for the durations told to decode.
        targets: decode's blocks for prompt blocks `ask.first_block`...
        sources: this worker's blocks of the whole prompt.
        pushed_to: prompt blocks below were posted, or are not wanted.
        pending: writes posted and not known to be over.
        written_at: since when all of `pending` has been under way; a write's end counts anew.
        num_posted: writes posted so far; numbers the next.
        failed: writes that FAILED while their agent lives: they may still read our blocks.
        may_land: a write FAILED: it may still land.
        stuck_since: since when the attempt waits for nothing but its writes to end; None while it
            works.
        wants_answer: the decode worker asked to settle.
        outcome: how it ends if nothing more happens.
    """

    ask: PrefillAsk
    block_size: int
    try_s: float
    deadline: float
    asked_at: float
    targets: tuple[BlockId, ...]
    pushed_to: int
    stage: Stage = Stage.QUEUED
    sources: tuple[BlockId, ...] = ()
    cached_tokens: int = 0
    started_at: float = 0.0
    computed_at: float | None = None
    samples: tuple[TokenSampled, ...] = ()
    pending: frozenset[int] = frozenset()
    written_at: float = 0.0
    num_posted: int = 0
    failed: frozenset[int] = frozenset()
    may_land: bool = False
    stuck_since: float | None = None
    wants_answer: bool = False
    outcome: AttemptOutcome = AttemptOutcome.COMPLETED

    @property
    def is_working(self) -> bool:
        """Return whether the prompt is not computed yet, and still wanted."""
        return self.stage in (Stage.QUEUED, Stage.COMPUTING)

    @property
    def num_first_tokens(self) -> int:
        """Return how many tokens are to be sampled: none when outputs are forced."""
        return 0 if self.ask.request.outputs else self.ask.request.sampling.n


Step = tuple[PrefillSide, tuple[Effect, ...]]


def receive(
    ask: PrefillAsk, terms: PrefillTerms, now: float, *, is_settled: bool
) -> tuple[PrefillSide | None, tuple[Effect, ...]]:
    """Take or refuse an ask.

    Args:
        is_settled: whether a settle of this attempt came before (see `tombstones`).

    Returns:
        The attempt's state and `Compute`, or None and the refusal.
    """
    refusal = _refusal(ask, terms, is_settled=is_settled)
    if refusal is not None:
        reason, message = refusal
        return None, (
            Tell(HandoffRefused(ask.handoff, reason, message)),
            Forget(ask.handoff, may_land=False, outcome=AttemptOutcome.REFUSED),
        )
    state = PrefillSide(
        ask=ask,
        block_size=terms.block_size,
        try_s=terms.try_s,
        deadline=now + ask.remaining_s,
        asked_at=now,
        targets=block_ids_of(ask.blocks),
        pushed_to=ask.first_block,
    )
    return state, (Compute(ask.request),)


def advance(state: PrefillSide, event: Event, now: float) -> Step:
    """Return the state after `event` at monotonic second `now`, and what to do, in order."""
    if state.stage is Stage.OVER:
        return state, ()
    match event:
        case EngineRefused() | PromptAdmitted() | ChunkComputed() | TokenSampled():
            return _engine_says(state, event, now)
        case WriteDone():
            pending = state.pending - {event.number}
            return _when_over(replace(state, pending=pending, written_at=now))
        case WriteFailed():
            return _write_failed(state, event, now)
        case WriteRefused():
            return _write_refused(state, event, now)
        case SettleRequested():
            return _stop(replace(state, wants_answer=True), AttemptOutcome.SETTLED, now)
        case DecodeLost():
            return _stop(state, AttemptOutcome.SETTLED, now)
        case AgentDestroyed():
            return _agent_destroyed(state, event.before, now)
        case Tick():
            return _tick(state, now)
        case _:
            assert_never(event)


def _refusal(ask: PrefillAsk, terms: PrefillTerms, *, is_settled: bool) -> tuple[str, str] | None:
    region = ask.region
    if is_settled:
        return "settled", "settled before it was asked"
    if terms.refusing:
        return terms.refusing, f"this worker takes no new prompts: {terms.refusing}"
    slip = slip_of(ask.request, ask.remaining_s)
    if slip:
        return "invalid", slip
    differing = summary_difference(terms.layout, region.layout)
    if differing is not None:
        name, here, there = differing
        return "layout", f"{name}: {here} here, {there} there"
    if region.block_bytes != terms.block_bytes:
        return "layout", f"block_bytes: {terms.block_bytes} here, {region.block_bytes} there"
    num_blocks = -(-len(ask.request.prompt) // terms.block_size)
    asked = ask.first_block + sum(run.count for run in ask.blocks)
    if asked != num_blocks:
        return "layout", f"blocks of the prompt: {num_blocks} here, {asked} there"
    if not _inside(ask, region):
        return "layout", f"blocks: outside of the region's {region.num_bytes} bytes"
    return None


def _inside(ask: PrefillAsk, region: RegionDescriptor) -> bool:
    end = region.num_bytes // region.block_bytes
    return all(run.first >= 0 and run.first + run.count <= end for run in ask.blocks)


def _engine_says(
    state: PrefillSide,
    event: EngineRefused | PromptAdmitted | ChunkComputed | TokenSampled,
    now: float,
) -> Step:
    if state.stage is Stage.STOPPING:
        return state, ()  # happened before the engine learned of the abort
    match event:
        case EngineRefused():
            refused = HandoffRefused(state.ask.handoff, event.reason, event.message)
            forget = Forget(state.ask.handoff, may_land=False, outcome=AttemptOutcome.REFUSED)
            return replace(state, stage=Stage.OVER), (Tell(refused), forget)
        case PromptAdmitted():
            admitted = replace(
                state,
                stage=Stage.COMPUTING,
                sources=event.block_ids,
                cached_tokens=event.cached_tokens,
                started_at=now,
            )
            return _push(admitted, event.cached_tokens, now)
        case ChunkComputed():
            pushed, effects = _push(state, event.num_computed, now)
            finished, told = _finish_prompt(pushed, event.num_computed, now)
            return finished, (*effects, *told)
        case TokenSampled():
            sampled = replace(state, samples=(*state.samples, event))
            return _tell_tokens(sampled)
        case _:
            assert_never(event)


def _push(state: PrefillSide, num_computed: int, now: float) -> Step:
    """Post what is final and was not posted: whole blocks, at the prompt's end its tail too."""
    first = state.ask.first_block
    is_end = num_computed == len(state.ask.request.prompt)
    final = first + len(state.targets) if is_end else num_computed // state.block_size
    if final <= state.pushed_to:
        return state, ()
    push = Push(
        number=state.num_posted,
        first_block=state.pushed_to,
        sources=state.sources[state.pushed_to : final],
        targets=state.targets[state.pushed_to - first : final - first],
    )
    posted = replace(
        state,
        pushed_to=final,
        pending=state.pending | {push.number},
        written_at=state.written_at if state.pending else now,
        num_posted=state.num_posted + 1,
    )
    return posted, (push,)


def _finish_prompt(state: PrefillSide, num_computed: int, now: float) -> Step:
    if num_computed < len(state.ask.request.prompt):
        return state, ()
    return _tell_tokens(replace(state, computed_at=now))


def _tell_tokens(state: PrefillSide) -> Step:
    """Send the first tokens once the prompt is computed and every sample has its own."""
    if state.computed_at is None or len(state.samples) < state.num_first_tokens:
        return state, ()
    lifetime = Lifetime()
    lifetime.stamp(Stamp.ASK_RECEIVED, state.asked_at)
    lifetime.stamp(Stamp.PREFILL_STARTED, state.started_at)
    lifetime.stamp(Stamp.PREFILL_FINISHED, state.computed_at)
    samples = sorted(state.samples, key=lambda sample: sample.sample_index)
    logprobs: list[TokenLogprobs] = [entry for sample in samples for entry in sample.logprobs]
    tokens = FirstTokens(
        handoff=state.ask.handoff,
        token_ids=tuple(sample.token_id for sample in samples),
        logprobs=tuple(logprobs),
        finish_reasons=tuple(sample.finish_reason for sample in samples),
        cached_tokens=state.cached_tokens,
        queue_s=lifetime.seconds(Duration.PREFILL_QUEUE) or 0.0,
        prefill_s=lifetime.seconds(Duration.PREFILL) or 0.0,
    )
    computed, effects = _when_over(replace(state, stage=Stage.COMPUTED))
    return computed, (Tell(tokens), *effects)


def _write_failed(state: PrefillSide, event: WriteFailed, now: float) -> Step:
    number = {event.number}
    failed = replace(state, pending=state.pending - number, failed=state.failed | number)
    return _fail(failed, event.reason, now, is_fabric=True)


def _write_refused(state: PrefillSide, event: WriteRefused, now: float) -> Step:
    state = replace(state, pending=state.pending - {event.number})
    if state.stage is Stage.STOPPING:
        return _when_over(state)
    stopped, effects = _stop(state, AttemptOutcome.FAILED, now)
    told = Tell(HandoffFailed(state.ask.handoff, event.reason, is_fabric=True))
    return stopped, (told, *effects)


def _agent_destroyed(state: PrefillSide, before: int, now: float) -> Step:
    cut = frozenset(number for number in state.pending if number < before)
    failed = frozenset(number for number in state.failed if number >= before)
    state = replace(state, pending=state.pending - cut, failed=failed)
    if not cut:
        return _when_over(state)
    return _fail(state, "the fabric agent was replaced", now, is_fabric=False)


def _fail(state: PrefillSide, reason: str, now: float, *, is_fabric: bool) -> Step:
    stopped, effects = _stop(replace(state, may_land=True), AttemptOutcome.FAILED, now)
    if state.may_land:
        return stopped, effects
    told = Tell(HandoffFailed(state.ask.handoff, reason, is_fabric=is_fabric))
    return stopped, (told, *effects)


def _tick(state: PrefillSide, now: float) -> Step:
    if state.stage is Stage.STOPPING:
        return state, ()
    if now >= state.deadline:
        return _time_out(state, "the request's time is over", now, is_fabric=False)
    if state.pending and now >= state.written_at + state.try_s:
        return _time_out(state, f"no write ended for {state.try_s} s", now, is_fabric=True)
    return state, ()


def _time_out(state: PrefillSide, reason: str, now: float, *, is_fabric: bool) -> Step:
    stopped, effects = _stop(state, AttemptOutcome.TIMED_OUT, now)
    told = Tell(HandoffFailed(state.ask.handoff, reason, is_fabric=is_fabric))
    return stopped, (told, *effects)


def _stop(state: PrefillSide, outcome: AttemptOutcome, now: float) -> Step:
    if state.stage is Stage.STOPPING:
        return _when_over(state)
    stopping = replace(state, stage=Stage.STOPPING, outcome=outcome, stuck_since=now)
    over, effects = _when_over(stopping)
    if state.stage is Stage.COMPUTED:
        return over, effects
    return over, (StopComputing(), *effects)


def _when_over(state: PrefillSide) -> Step:
    if state.is_working or state.pending or state.failed:
        return state, ()
    handoff = state.ask.handoff
    is_settled = state.wants_answer and not state.may_land
    answer = (Tell(HandoffSettled(handoff)),) if is_settled else ()
    forget = Forget(handoff, state.may_land, state.outcome)
    return replace(state, stage=Stage.OVER), (Release(), *answer, forget)
