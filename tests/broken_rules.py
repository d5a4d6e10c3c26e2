"""handoff.md's rules, each broken once in the real code, for whoever must find the violation.

The switches are here, in the tests: nothing in the product can turn a rule off.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from core.ids import BlockId
from core.messages import HandoffSettled
from decode_pool.prefill_peers import PrefillPeers
from decode_pool.receiving import Receiving as Handoffs
from engine.memory.kv_memory import KvMemory
from engine.scheduling.plan_builder import PlanBuilder
from engine.scheduling.receiving import Receiving
from engine.scheduling.retirement import Retirement
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff import decode_side, prefill_side, quarantine
from kv_transfer.handoff import prefill_messages as p
from kv_transfer.handoff.arrivals import Arrivals
from kv_transfer.handoff.tombstones import Tombstones
from planner.protocol.network import Latency
from planner.protocol.scenario import (
    DECODES,
    PREFILLS,
    Fault,
    FaultKind,
    Scenario,
)
from prefill_pool.attempts import Attempts
from router.dispatch import placement, request_state
from router.dispatch.interface import Disaggregate
from router.dispatch.request_state import RequestState

Patch = pytest.MonkeyPatch


Focus = Callable[[Scenario, random.Random], Scenario]
"""Turns a drawn scenario into one in which a rare order of events is likelier."""


def as_drawn(scenario: Scenario, dice: random.Random) -> Scenario:
    """Return the scenario itself."""
    del dice
    return scenario


class BrokenRule(NamedTuple):
    """One rule.

    Attributes:
        rule: as handoff.md has it.
        breaks: does away with it.
        violated: the invariants by which that may show.
        seed: finds it; others are tried when it no longer does.
    """

    rule: str
    breaks: Callable[[Patch], None]
    violated: frozenset[str]
    seed: int
    focus: Focus = as_drawn


# --- scenarios ------------------------------------------------------------------------------------


def _handoffs_only(scenario: Scenario, at: Callable[[], float]) -> Scenario:
    """Let nobody leave, and every prompt be computed elsewhere."""
    requests = [
        replace(
            plan,
            at=at(),
            disaggregate=Disaggregate.ALWAYS,
            leaves_after=None,
            leaves_at=None,
            stops_after=None,
        )
        for plan in scenario.requests
    ]
    return replace(scenario, requests=tuple(requests), decode_blocks=30, prefill_blocks=30)


def _asks_on_lost_connections(scenario: Scenario, dice: random.Random) -> Scenario:
    """Connections are lost as asks travel on them, and opened anew at once for others."""
    pairs = [(decode, prefill) for decode in DECODES for prefill in PREFILLS]
    faults = [
        Fault(FaultKind.RESET, dice.uniform(0.45, 0.8), target=decode, other=prefill)
        for decode, prefill in pairs * 3
    ]
    crowd = replace(scenario, requests=scenario.requests * 3, max_waiting=64)
    busy = _handoffs_only(crowd, lambda: dice.uniform(0.4, 0.8))
    latency = Latency(max_s=0.02, slow_share=0.2, slow_max_s=0.2)
    return replace(busy, faults=tuple(faults), latency=latency, step_s=0.004)


def _frozen_targets(scenario: Scenario, dice: random.Random) -> Scenario:
    """Decode workers freeze under slow writes, until their writers destroy their agents."""
    faults = [
        Fault(FaultKind.FREEZE, dice.uniform(0.45, 0.7), dice.uniform(1.2, 2.5), target=name)
        for name in DECODES
    ]
    busy = _handoffs_only(scenario, lambda: dice.uniform(0.4, 0.6))
    return replace(busy, faults=tuple(faults), descriptor_max_s=0.2, must_poll=False)


def _frozen_writers(scenario: Scenario, dice: random.Random) -> Scenario:
    """Prefill workers freeze under slow writes, for longer than their silence is borne."""
    faults = [
        Fault(FaultKind.FREEZE, dice.uniform(0.45, 0.7), dice.uniform(0.8, 2.0), target=name)
        for name in PREFILLS
    ]
    busy = _handoffs_only(scenario, lambda: dice.uniform(0.4, 0.6))
    return replace(busy, faults=tuple(faults), descriptor_max_s=0.2, must_poll=False)


def _restarted_writers(scenario: Scenario, dice: random.Random) -> Scenario:
    """Prefill workers die under slow writes, and are back at once."""
    faults = [
        Fault(FaultKind.KILL, dice.uniform(0.45, 0.6), 0.01, target=name, buffered=3)
        for name in PREFILLS
    ]
    busy = _handoffs_only(scenario, lambda: dice.uniform(0.4, 1.0))
    return replace(
        busy, faults=tuple(faults), descriptor_max_s=0.5, must_poll=False, latency=Latency()
    )


def _frozen_twins(scenario: Scenario, dice: random.Random) -> Scenario:
    """Decode workers freeze under long requests, and thaw when these run elsewhere."""
    faults = [
        Fault(FaultKind.FREEZE, dice.uniform(0.5, 1.5), dice.uniform(0.7, 2.0), target=name)
        for name in DECODES
    ]
    busy = _handoffs_only(scenario, lambda: dice.uniform(0.4, 0.8))
    requests = [
        replace(plan, sampling=replace(plan.sampling, max_tokens=14)) for plan in busy.requests
    ]
    return replace(busy, requests=tuple(requests), faults=tuple(faults), step_s=0.1)


# --- blocks of an attempt -------------------------------------------------------------------------


def _no_quarantine(patch: Patch) -> None:
    end = Receiving.end
    patch.setattr(Receiving, "end", lambda self, handoff, **_: end(self, handoff, quarantine=False))


def _lost_connection_ends_quarantine(patch: Patch) -> None:
    peer_closed = Handoffs.peer_closed

    def closed(self: Any, stream: Any, reason: str) -> None:
        peer_closed(self, stream, reason)
        for handoff in self._quarantine.handoffs_of(stream.peer.boot):
            self._settled(handoff)

    patch.setattr(Handoffs, "peer_closed", closed)


def _suspicion_ends_quarantine(patch: Patch) -> None:
    """A frozen writer is taken for a dead one."""
    peer_suspect = Handoffs.peer_suspect

    def suspected(self: Any, stream: Any, *, suspect: bool) -> None:
        peer_suspect(self, stream, suspect=suspect)
        for handoff in self._quarantine.handoffs_of(stream.peer.boot):
            self._settled(handoff)

    patch.setattr(Handoffs, "peer_suspect", suspected)


def _restart_ends_quarantine(patch: Patch) -> None:
    """The writer's process is known to be gone, for its name is served by another life."""
    peer_opened = Handoffs.peer_opened

    def opened(self: Any, stream: Any) -> None:
        peer_opened(self, stream)
        for entry in list(self._quarantine.entries.values()):
            if entry.worker_id == stream.peer.name and entry.peer != stream.peer.boot:
                self._settled(entry.handoff)

    patch.setattr(Handoffs, "peer_opened", opened)


def _settled_before_done(patch: Patch) -> None:
    advance = prefill_side.advance

    def answers_at_once(state: Any, event: Any, now: float) -> Any:
        after, effects = advance(state, event, now)
        if isinstance(event, p.SettleRequested) and after.pending:
            effects = (*effects, p.Tell(HandoffSettled(state.ask.handoff)))
        return after, effects

    patch.setattr(prefill_side, "advance", answers_at_once)


def _failed_is_settled(patch: Patch) -> None:
    write_failed = prefill_side._write_failed

    def harmless(state: Any, event: Any, now: float) -> Any:
        after, effects = write_failed(state, event, now)
        return replace(after, may_land=False, failed=frozenset()), effects

    patch.setattr(prefill_side, "_write_failed", harmless)


def _destroyed_agent_settles(patch: Patch) -> None:
    destroyed = prefill_side._agent_destroyed

    def harmless(state: Any, before: int, now: float) -> Any:
        after, effects = destroyed(state, before, now)
        settled = p.Tell(HandoffSettled(state.ask.handoff))
        return replace(after, may_land=False), (*effects, settled)

    patch.setattr(prefill_side, "_agent_destroyed", harmless)


def _sources_freed_before_done(patch: Patch) -> None:
    when_over = prefill_side._when_over

    def over_at_once(state: Any) -> Any:
        if state.is_working:
            return state, ()
        return when_over(replace(state, pending=frozenset(), failed=frozenset()))

    patch.setattr(prefill_side, "_when_over", over_at_once)


def _no_tombstone(patch: Patch) -> None:
    patch.setattr(Tombstones, "__contains__", lambda self, handoff: False)


def _first_token_frees_blocks(patch: Patch) -> None:
    tokens = decode_side._tokens

    def ends_when_answered(state: Any, message: Any, now: float) -> Any:
        after, effects = tokens(state, message, now)
        if after.phase is decode_side.Phase.RECEIVING and after.is_answered:
            end = decode_side._End(d.AttemptOutcome.ABORTED, "answered", untouched=True)
            after, more = decode_side._finish(after, end)
            effects = (*effects, *more)
        return after, effects

    patch.setattr(decode_side, "_tokens", ends_when_answered)


def _abort_forgets_blocks(patch: Patch) -> None:
    finish = decode_side._finish

    def forgets(state: Any, end: Any) -> Any:
        return finish(state, replace(end, untouched=True))

    patch.setattr(decode_side, "_finish", forgets)


def _abort_does_not_settle(patch: Patch) -> None:
    def silent(self: Any, boot: Any, handoff: Any) -> bool:
        return False

    patch.setattr(PrefillPeers, "settle", silent)


# --- fences ---------------------------------------------------------------------------------------


def _fence_does_not_move(patch: Patch) -> None:
    def stays(self: Any) -> int:
        self._generation += 1
        return self._generation

    patch.setattr("planner.protocol.region.SimRegion.fence", stays)


def _fence_retries_nobody(patch: Patch) -> None:
    patch.setattr(decode_side, "_revoked", lambda state, event: (state, ()))


def _sinks_go_at_once(patch: Patch) -> None:
    advance = quarantine.advance

    def releases(state: Any, event: Any, now: float) -> Any:
        after, effects = advance(state, event, now)
        if isinstance(event, quarantine.Fenced):
            effects = (*effects, quarantine.ReleaseSinks())
        return after, effects

    patch.setattr(quarantine, "advance", releases)


# --- joining --------------------------------------------------------------------------------------


def _join_on_last_notification(patch: Patch) -> None:
    def has_last(self: Arrivals) -> bool:
        return any(run[1] == self.end for runs in self.landed.values() for run in runs)

    patch.setattr(Arrivals, "is_complete", property(has_last))


def _notification_of_any_attempt(patch: Patch) -> None:
    peer_says = decode_side._peer_says

    def takes_all(state: Any, event: Any, now: float) -> Any:
        if isinstance(event, decode_side.WriteNotification):
            event = replace(event, handoff=state.handoff, source=state.candidate.boot)
            event = replace(event, generation=state.generation)
        return peer_says(state, event, now)

    patch.setattr(decode_side, "_peer_says", takes_all)


def _inbound_blocks_matchable(patch: Patch) -> None:
    reserve = Receiving.reserve

    def publishes(self: Any, handoff: Any, sequence: Any, hits: Any) -> None:
        reserve(self, handoff, sequence, hits)
        num_full = len(sequence.token_ids) // self._memory.block_size
        self._memory.publish(sequence.hashes[:num_full], sequence.blocks)

    patch.setattr(Receiving, "reserve", publishes)


def _hits_not_held(patch: Patch) -> None:
    hold = KvMemory.hold

    def forgets(self: KvMemory, block_ids: list[BlockId]) -> None:
        if not any(self.pool.num_holders(block_id) == 0 for block_id in block_ids):
            hold(self, block_ids)

    patch.setattr(KvMemory, "hold", forgets)


def _whole_prompt_reused(patch: Patch) -> None:
    patch.setattr(KvMemory, "num_reusable", lambda self, num_tokens: num_tokens // self.block_size)


def _tail_not_zeroed(patch: Patch) -> None:
    patch.setattr(PlanBuilder, "zero", lambda self, block_ids: None)


def _freed_under_a_step(patch: Patch) -> None:
    patch.setattr(Retirement, "let_go", lambda self, sequence: self._release(sequence))


# --- tokens ---------------------------------------------------------------------------------------


def _retry_samples_again(patch: Patch) -> None:
    patch.setattr(decode_side, "_forcing", lambda state: state.request)


def _retry_redraws_seed(patch: Patch) -> None:
    start = placement._start

    def redraws(live: Any, decision: Any, dispatch: Any, now: float) -> Any:
        message = start(live, decision, dispatch, now)
        sampling = message.request.sampling
        drawn = replace(sampling, seed=sampling.seed + dispatch.number - 1)
        return replace(message, request=replace(message.request, sampling=drawn))

    patch.setattr(placement, "_start", redraws)


def _any_token_taken(patch: Patch) -> None:
    def takes_all(self: RequestState, update: Any, now: float) -> Any:
        if self.phase is request_state.Phase.ENDED:
            return ()
        return self._accept(update, now)

    patch.setattr(RequestState, "updated", takes_all)


def _sibling_cancels(patch: Patch) -> None:
    def all_end(state: Any, event: Any) -> Any:
        del event
        return decode_side._finish(state, decode_side._End(d.AttemptOutcome.ABORTED, "sibling"))

    patch.setattr(decode_side, "_sample_aborted", all_end)


# --- life -----------------------------------------------------------------------------------------


def _no_progress_is_borne(patch: Patch) -> None:
    def never(state: Any, now: float) -> Any:
        return state, ()

    patch.setattr(decode_side, "_tick", never)


def _agent_never_renewed(patch: Patch) -> None:
    patch.setattr(Attempts, "is_renewal_due", lambda self: False)


def _dead_worker_is_waited_for(patch: Patch) -> None:
    patch.setattr(RequestState, "stream_lost", lambda self, worker_id, reason, now: ())


_LATE = frozenset({"writable", "radix", "oracle", "tail"})
_ENDLESS = frozenset({"stuck", "refused"})


def _rule(
    rule: str,
    breaks: Callable[[Patch], None],
    violated: frozenset[str],
    *,
    seed: int = 0,
    focus: Focus = as_drawn,
) -> BrokenRule:
    return BrokenRule(rule, breaks, violated, seed, focus)


BROKEN_RULES = [
    _rule(
        "every attempt has fresh blocks; those of an abandoned one are quarantined",
        _no_quarantine,
        _LATE,
        seed=13,
    ),
    _rule(
        "a closed socket ends no quarantine",
        _lost_connection_ends_quarantine,
        _LATE,
        seed=87,
    ),
    _rule(
        "a lost lease or missing heartbeats end no quarantine",
        _suspicion_ends_quarantine,
        _LATE,
        focus=_frozen_writers,
    ),
    _rule(
        "a writer's death ends no quarantine: its buffers land yet",
        _restart_ends_quarantine,
        _LATE,
        focus=_restarted_writers,
        seed=2,
    ),
    _rule(
        "a settle is answered only when every handle is DONE",
        _settled_before_done,
        _LATE,
        seed=13,
    ),
    _rule(
        "FAILED is not settled",
        _failed_is_settled,
        _LATE | {"source"},
        seed=5,
    ),
    _rule(
        "destroying the agent settles nothing",
        _destroyed_agent_settles,
        _LATE,
        focus=_frozen_targets,
    ),
    _rule(
        "prefill lets go of its blocks only after DONE",
        _sources_freed_before_done,
        frozenset({"source", "tail"}),
    ),
    _rule(
        "a settle leaves a tombstone: it may overtake the ask",
        _no_tombstone,
        _LATE,
        focus=_asks_on_lost_connections,
        seed=12,
    ),
    _rule(
        "a first token that ends the request frees no block in flight",
        _first_token_frees_blocks,
        _LATE,
    ),
    _rule(
        "an abort quarantines what may still be written",
        _abort_forgets_blocks,
        _LATE,
        seed=6,
    ),
    _rule(
        "an abort asks the writer to settle",
        _abort_does_not_settle,
        frozenset({"fenced", "stuck"}),
        seed=8,
    ),
    _rule(
        "a fence makes the address that peers know a sink",
        _fence_does_not_move,
        _LATE,
        seed=90,
    ),
    _rule(
        "attempts whose writes a fence loses are retried",
        _fence_retries_nobody,
        _LATE | {"stuck"},
        seed=5,
    ),
    _rule(
        "sinks stay mapped until every boot that held the address is gone",
        _sinks_go_at_once,
        frozenset({"writable"}),
        seed=60,
    ),
    _rule(
        "decode joins when the union is complete, whatever the order",
        _join_on_last_notification,
        _LATE | {"crash"},
        seed=2,
    ),
    _rule(
        "a notification counts for its attempt, boots and generation only",
        _notification_of_any_attempt,
        _LATE | {"crash"},
        seed=76,
    ),
    _rule(
        "inbound blocks are invisible to the radix tree until complete",
        _inbound_blocks_matchable,
        frozenset({"radix", "accounting"}),
    ),
    _rule(
        "hits are held from the reservation on",
        _hits_not_held,
        frozenset({"accounting", "crash", "radix", "owned"}),
    ),
    _rule(
        "at most (n - 1) // block_size blocks of a prompt are reused",
        _whole_prompt_reused,
        _ENDLESS | {"crash", "oracle", "accounting"},
        seed=11,
    ),
    _rule(
        "the tail of a partial block is zeroed at allocation",
        _tail_not_zeroed,
        frozenset({"tail"}),
    ),
    _rule(
        "a block that a launched step may write is reservable after that step",
        _freed_under_a_step,
        frozenset({"owned", "accounting"}),
        seed=5,
    ),
    _rule(
        "a retry forces what was emitted; nobody samples that position again",
        _retry_samples_again,
        frozenset({"contiguous", "crash"}),
        seed=26,
    ),
    _rule(
        "the router fixes the seed at admission",
        _retry_redraws_seed,
        frozenset({"oracle", "radix"}),
        seed=7,
    ),
    _rule(
        "a receiver takes only the current attempt and the next index",
        _any_token_taken,
        frozenset({"contiguous", "oracle", "crash"}),
        focus=_frozen_twins,
        seed=6,
    ),
    _rule(
        "a sibling's abort never cancels the handoff",
        _sibling_cancels,
        _ENDLESS | {"crash", "contiguous"},
        seed=2,
    ),
    _rule(
        "a try without progress ends",
        _no_progress_is_borne,
        _ENDLESS,
        seed=42,
    ),
    _rule(
        "blocks under a stuck write are let go of with the agent",
        _agent_never_renewed,
        frozenset({"stuck"}),
        seed=5,
    ),
    _rule(
        "a dead decode worker's requests go elsewhere",
        _dead_worker_is_waited_for,
        _ENDLESS,
        seed=7,
    ),
]
