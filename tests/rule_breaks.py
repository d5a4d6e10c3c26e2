"""Ways of breaking the handoff's rules in the real code, one a function.

The switches are here, in the tests: nothing in the product can turn a rule off."""

from __future__ import annotations

from typing import Any

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
from prefill_pool.attempts import Attempts
from router.dispatch import placement, request_state
from router.dispatch.request_state import RequestState

Patch = pytest.MonkeyPatch


# --- blocks of an attempt -------------------------------------------------------------------------


def no_quarantine(patch: Patch) -> None:
    end = Receiving.end
    patch.setattr(Receiving, "end", lambda self, handoff, **_: end(self, handoff, quarantine=False))


def lost_connection_ends_quarantine(patch: Patch) -> None:
    peer_closed = Handoffs.peer_closed

    def closed(self: Any, stream: Any, reason: str) -> None:
        peer_closed(self, stream, reason)
        for handoff in self._quarantine.handoffs_of(stream.peer.boot):
            self._settled(handoff)

    patch.setattr(Handoffs, "peer_closed", closed)


def suspicion_ends_quarantine(patch: Patch) -> None:
    """A frozen writer is taken for a dead one."""
    peer_suspect = Handoffs.peer_suspect

    def suspected(self: Any, stream: Any, *, suspect: bool) -> None:
        peer_suspect(self, stream, suspect=suspect)
        for handoff in self._quarantine.handoffs_of(stream.peer.boot):
            self._settled(handoff)

    patch.setattr(Handoffs, "peer_suspect", suspected)


def restart_ends_quarantine(patch: Patch) -> None:
    """The writer's process is known to be gone, for its name is served by another life."""
    peer_opened = Handoffs.peer_opened

    def opened(self: Any, stream: Any) -> None:
        peer_opened(self, stream)
        for entry in list(self._quarantine.entries.values()):
            if entry.worker_id == stream.peer.name and entry.peer != stream.peer.boot:
                self._settled(entry.handoff)

    patch.setattr(Handoffs, "peer_opened", opened)


def settled_before_done(patch: Patch) -> None:
    advance = prefill_side.advance

    def answers_at_once(state: Any, event: Any, now: float) -> Any:
        after, effects = advance(state, event, now)
        if isinstance(event, p.SettleRequested) and after.pending:
            effects = (*effects, p.Tell(HandoffSettled(state.ask.handoff)))
        return after, effects

    patch.setattr(prefill_side, "advance", answers_at_once)


def failed_is_settled(patch: Patch) -> None:
    write_failed = prefill_side._write_failed

    def harmless(state: Any, event: Any, now: float) -> Any:
        after, effects = write_failed(state, event, now)
        return replace(after, may_land=False, failed=frozenset()), effects

    patch.setattr(prefill_side, "_write_failed", harmless)


def destroyed_agent_settles(patch: Patch) -> None:
    destroyed = prefill_side._agent_destroyed

    def harmless(state: Any, before: int, now: float) -> Any:
        after, effects = destroyed(state, before, now)
        settled = p.Tell(HandoffSettled(state.ask.handoff))
        return replace(after, may_land=False), (*effects, settled)

    patch.setattr(prefill_side, "_agent_destroyed", harmless)


def sources_freed_before_done(patch: Patch) -> None:
    when_over = prefill_side._when_over

    def over_at_once(state: Any) -> Any:
        if state.is_working:
            return state, ()
        return when_over(replace(state, pending=frozenset(), failed=frozenset()))

    patch.setattr(prefill_side, "_when_over", over_at_once)


def no_tombstone(patch: Patch) -> None:
    patch.setattr(Tombstones, "__contains__", lambda self, handoff: False)


def first_token_frees_blocks(patch: Patch) -> None:
    tokens = decode_side._tokens

    def ends_when_answered(state: Any, message: Any, now: float) -> Any:
        after, effects = tokens(state, message, now)
        if after.phase is decode_side.Phase.RECEIVING and after.is_answered:
            end = decode_side._End(d.AttemptOutcome.ABORTED, "answered", untouched=True)
            after, more = decode_side._finish(after, end)
            effects = (*effects, *more)
        return after, effects

    patch.setattr(decode_side, "_tokens", ends_when_answered)


def abort_forgets_blocks(patch: Patch) -> None:
    finish = decode_side._finish

    def forgets(state: Any, end: Any) -> Any:
        return finish(state, replace(end, untouched=True))

    patch.setattr(decode_side, "_finish", forgets)


def abort_does_not_settle(patch: Patch) -> None:
    def silent(self: Any, boot: Any, handoff: Any) -> bool:
        return False

    patch.setattr(PrefillPeers, "settle", silent)


# --- fences ---------------------------------------------------------------------------------------


def fence_does_not_move(patch: Patch) -> None:
    def stays(self: Any) -> int:
        self._generation += 1
        return self._generation

    patch.setattr("planner.protocol.region.SimRegion.fence", stays)


def fence_retries_nobody(patch: Patch) -> None:
    patch.setattr(decode_side, "_revoked", lambda state, event: (state, ()))


def sinks_go_at_once(patch: Patch) -> None:
    advance = quarantine.advance

    def releases(state: Any, event: Any, now: float) -> Any:
        after, effects = advance(state, event, now)
        if isinstance(event, quarantine.Fenced):
            effects = (*effects, quarantine.ReleaseSinks())
        return after, effects

    patch.setattr(quarantine, "advance", releases)


# --- joining --------------------------------------------------------------------------------------


def join_on_last_notification(patch: Patch) -> None:
    def has_last(self: Arrivals) -> bool:
        return any(run[1] == self.end for runs in self.landed.values() for run in runs)

    patch.setattr(Arrivals, "is_complete", property(has_last))


def notification_of_any_attempt(patch: Patch) -> None:
    peer_says = decode_side._peer_says

    def takes_all(state: Any, event: Any, now: float) -> Any:
        if isinstance(event, decode_side.WriteNotification):
            event = replace(event, handoff=state.handoff, source=state.candidate.boot)
            event = replace(event, generation=state.generation)
        return peer_says(state, event, now)

    def landed(self: Any, write: Any) -> None:
        live = self._owner.find(write.handoff)
        if live is not None:
            self.advance(live, write)

    patch.setattr(decode_side, "_peer_says", takes_all)
    patch.setattr(Handoffs, "landed", landed)


def inbound_blocks_matchable(patch: Patch) -> None:
    reserve = Receiving.reserve

    def publishes(self: Any, handoff: Any, sequence: Any, hits: Any) -> None:
        reserve(self, handoff, sequence, hits)
        num_full = len(sequence.token_ids) // self._memory.block_size
        self._memory.publish(sequence.hashes[:num_full], sequence.blocks)

    patch.setattr(Receiving, "reserve", publishes)


def hits_not_held(patch: Patch) -> None:
    hold = KvMemory.hold

    def forgets(self: KvMemory, block_ids: list[BlockId]) -> None:
        if not any(self.pool.num_holders(block_id) == 0 for block_id in block_ids):
            hold(self, block_ids)

    patch.setattr(KvMemory, "hold", forgets)


def whole_prompt_reused(patch: Patch) -> None:
    patch.setattr(KvMemory, "num_reusable", lambda self, num_tokens: num_tokens // self.block_size)


def tail_not_zeroed(patch: Patch) -> None:
    patch.setattr(PlanBuilder, "zero", lambda self, block_ids: None)


def freed_under_a_step(patch: Patch) -> None:
    patch.setattr(Retirement, "let_go", lambda self, sequence: self._release(sequence))


# --- tokens ---------------------------------------------------------------------------------------


def retry_samples_again(patch: Patch) -> None:
    patch.setattr(decode_side, "_forcing", lambda state: state.request)


def retry_redraws_seed(patch: Patch) -> None:
    start = placement._start

    def redraws(live: Any, decision: Any, dispatch: Any, now: float) -> Any:
        message = start(live, decision, dispatch, now)
        sampling = message.request.sampling
        drawn = replace(sampling, seed=sampling.seed + dispatch.number - 1)
        return replace(message, request=replace(message.request, sampling=drawn))

    patch.setattr(placement, "_start", redraws)


def any_token_taken(patch: Patch) -> None:
    def takes_all(self: RequestState, update: Any, now: float) -> Any:
        if self.phase is request_state.Phase.ENDED:
            return ()
        return self._accept(update, now)

    patch.setattr(RequestState, "updated", takes_all)


def sibling_cancels(patch: Patch) -> None:
    def all_end(state: Any, event: Any) -> Any:
        del event
        return decode_side._finish(state, decode_side._End(d.AttemptOutcome.ABORTED, "sibling"))

    patch.setattr(decode_side, "_sample_aborted", all_end)


# --- life -----------------------------------------------------------------------------------------


def no_progress_is_borne(patch: Patch) -> None:
    def never(state: Any, now: float) -> Any:
        return state, ()

    patch.setattr(decode_side, "_tick", never)


def agent_never_renewed(patch: Patch) -> None:
    patch.setattr(Attempts, "is_renewal_due", lambda self: False)


def dead_worker_is_waited_for(patch: Patch) -> None:
    patch.setattr(RequestState, "stream_lost", lambda self, worker_id, reason, now: ())
