"""Each breaks one rule of the handoff protocol: in the state machines, or in how a pool obeys them.

The pools' side is broken in the handoff world, which stands in for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from core.ids import Boot
from core.messages import HandoffRefused, HandoffSettled
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff import decode_side, prefill_side, quarantine
from kv_transfer.handoff import prefill_messages as p
from kv_transfer.handoff.arrivals import Arrivals
from kv_transfer.handoff.tombstones import Tombstones
from tests.handoff_decode_end import DecodeEnd
from tests.handoff_faults import Faults

Break = Callable[[pytest.MonkeyPatch], None]


def wrap(patch: pytest.MonkeyPatch, target: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have `wrapper` called with what it replaces and the arguments."""
    original = getattr(target, name)
    patch.setattr(target, name, lambda *args, **fields: wrapper(original, *args, **fields))


# --- names: boots, attempts ---------------------------------------------------------------------


def _untouched(effect: type[Any], name: str) -> Break:
    def breaks(patch: pytest.MonkeyPatch) -> None:
        wrap(
            patch,
            decode_side,
            effect.__name__,
            lambda original, *fields: replace(original(*fields), untouched=True),
        )

    breaks.__name__ = name
    return breaks


retried_blocks_are_free_at_once = _untouched(d.Retry, "retried_blocks_are_free_at_once")
aborted_blocks_are_free_at_once = _untouched(d.EndReservation, "aborted_blocks_are_free_at_once")
fallen_back_blocks_are_free_at_once = _untouched(
    d.ComputeLocally, "fallen_back_blocks_are_free_at_once"
)


def a_retry_keeps_its_blocks(patch: pytest.MonkeyPatch) -> None:
    def reserve(original: Any, end: DecodeEnd) -> None:
        scene = end._scene
        handoff, request_id = scene.waiting[0]
        num, trial = scene.num_blocks_of(request_id), handoff.attempt.trial
        old = [number for number, block in scene.blocks.items() if block.owner is not None]
        if trial == 1 or len(old) != num:
            original(end)
            return
        for number in scene.free_blocks():
            scene.blocks[number] = scene.blocks[number]._replace(state="cached")
        for number in old:
            scene.blocks[number] = scene.blocks[number]._replace(state="free", owner=None)
        original(end)

    wrap(patch, DecodeEnd, "reserve", reserve)


def another_attempts_messages_count(patch: pytest.MonkeyPatch) -> None:
    def says(original: Any, state: Any, event: Any, now: float) -> Any:
        return original(state, replace(event, handoff=state.handoff), now)

    wrap(patch, decode_side, "_peer_says", says)


def another_attempts_refusal_counts(patch: pytest.MonkeyPatch) -> None:
    def says(original: Any, state: Any, event: Any, now: float) -> Any:
        if isinstance(event, HandoffRefused):
            event = replace(event, handoff=state.handoff)
        return original(state, event, now)

    wrap(patch, decode_side, "_peer_says", says)


# --- decode reserves, prefill pushes ------------------------------------------------------------


def blocks_are_named_from_the_first_on(patch: pytest.MonkeyPatch) -> None:
    def ask(original: Any, state: Any, event: d.BlocksReserved, now: float) -> Any:
        state, (effect,) = original(state, event, now)
        first = effect.first_block
        blocks = decode_side.block_runs(event.block_ids[: len(event.block_ids) - first])
        return state, (replace(effect, blocks=blocks),)

    wrap(patch, decode_side, "_ask", ask)


def the_last_blocks_notification_joins(patch: pytest.MonkeyPatch) -> None:
    def is_complete(self: Arrivals) -> bool:
        return any(run[1] == self.end for runs in self.landed.values() for run in runs)

    patch.setattr(Arrivals, "is_complete", property(is_complete))


def first_tokens_join(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arrivals, "is_complete", property(lambda self: self.end > 0))


def a_final_first_token_frees_the_blocks(patch: pytest.MonkeyPatch) -> None:
    def tokens(original: Any, state: Any, message: Any, now: float) -> Any:
        state, effects = original(state, message, now)
        if state.is_answered and state.phase is decode_side.Phase.RECEIVING:
            end = decode_side._End(d.AttemptOutcome.COMPLETED, "", untouched=True)
            state, more = decode_side._finish(state, end)
            return state, (*effects, *more)
        return state, effects

    wrap(patch, decode_side, "_tokens", tokens)


def a_first_token_waits_for_the_kv(patch: pytest.MonkeyPatch) -> None:
    def tokens(original: Any, state: Any, message: Any, now: float) -> Any:
        after, effects = original(state, message, now)
        if after.phase is decode_side.Phase.RECEIVING:
            effects = tuple(e for e in effects if not isinstance(e, d.EmitTokens))
        return after, effects

    wrap(patch, decode_side, "_tokens", tokens)


def a_retry_forgets_what_was_emitted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decode_side, "_forcing", lambda state: state.request)


def a_siblings_abort_ends_the_handoff(patch: pytest.MonkeyPatch) -> None:
    def aborted(original: Any, state: Any, event: Any) -> Any:
        end = decode_side._End(d.AttemptOutcome.ABORTED, "a sample was aborted")
        return decode_side._finish(state, end)

    wrap(patch, decode_side, "_sample_aborted", aborted)


def an_aborted_samples_token_is_sent(patch: pytest.MonkeyPatch) -> None:
    def emit(original: Any, tokens: Any, samples: Any) -> Any:
        return original(tokens=tokens, samples=tuple(range(len(tokens.token_ids))))

    wrap(patch, decode_side, "EmitTokens", emit)


def a_receiving_request_cannot_be_aborted(patch: pytest.MonkeyPatch) -> None:
    def advance(original: Any, state: Any, event: Any, now: float) -> Any:
        is_receiving = state.phase is decode_side.Phase.RECEIVING
        is_abort = isinstance(event, d.Aborted)
        return (state, ()) if is_receiving and is_abort else original(state, event, now)

    wrap(patch, decode_side, "advance", advance)


def silence_is_borne_for_ever(patch: pytest.MonkeyPatch) -> None:
    def tick(original: Any, state: Any, now: float) -> Any:
        return original(replace(state, progress_at=now), now)

    wrap(patch, decode_side, "_tick", tick)


# --- ending an attempt: settle ------------------------------------------------------------------


def no_tombstone_refuses_an_ask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tombstones, "__contains__", lambda self, handoff: False)


def a_settle_of_what_is_unknown_has_no_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tombstones, "may_land", lambda self, handoff: True)


def a_settle_is_answered_at_once(patch: pytest.MonkeyPatch) -> None:
    def advance(original: Any, state: Any, event: Any, now: float) -> Any:
        after, effects = original(state, event, now)
        if isinstance(event, p.SettleRequested):
            effects = (*effects, p.Tell(HandoffSettled(state.ask.handoff)))
        return after, effects

    wrap(patch, prefill_side, "advance", advance)


def a_settle_is_answered_when_nothing_is_pending(patch: pytest.MonkeyPatch) -> None:
    def over(original: Any, state: Any) -> Any:
        return original(replace(state, may_land=False))

    wrap(patch, prefill_side, "_when_over", over)


def a_failed_write_counts_as_done(patch: pytest.MonkeyPatch) -> None:
    def failed(original: Any, state: Any, event: Any, now: float) -> Any:
        return prefill_side.advance(state, p.WriteDone(event.number), now)

    wrap(patch, prefill_side, "_write_failed", failed)


def a_failed_write_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tombstones, "may_land", lambda self, handoff: False)


def blocks_are_let_go_of_at_a_settle(patch: pytest.MonkeyPatch) -> None:
    def stop(original: Any, state: Any, outcome: Any, now: float) -> Any:
        state, effects = original(state, outcome, now)
        return state, (*effects, p.Release())

    wrap(patch, prefill_side, "_stop", stop)


def blocks_are_let_go_of_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    def failed(original: Any, state: Any, event: Any, now: float) -> Any:
        state, effects = original(state, event, now)
        return state, (*effects, p.Release())

    wrap(patch, prefill_side, "_write_failed", failed)


def a_settle_is_sent_before_the_quarantine_begins(patch: pytest.MonkeyPatch) -> None:
    def abandon(original: Any, state: Any, end: Any, blocks: Any) -> Any:
        return original(state, end, blocks)[::-1]

    wrap(patch, decode_side, "_abandon", abandon)


# --- ending an attempt: quarantine and fence ----------------------------------------------------


def _settle_all_of(end: DecodeEnd, boot: Boot) -> None:
    for handoff in end._scene.quarantine.handoffs_of(boot):
        end.quarantine_event(quarantine.Settled(handoff))


def a_lost_lease_ends_a_quarantine(patch: pytest.MonkeyPatch) -> None:
    """Its key's DELETE: the peer is suspect."""

    def suspect(original: Any, faults: Faults, boot: Boot) -> None:
        original(faults, boot)
        _settle_all_of(faults._decode, boot)

    wrap(patch, Faults, "suspect", suspect)


def a_closed_socket_ends_a_quarantine(patch: pytest.MonkeyPatch) -> None:
    def lose(original: Any, faults: Faults, boot: Boot) -> None:
        original(faults, boot)
        _settle_all_of(faults._decode, boot)

    wrap(patch, Faults, "lose_streams", lose)


def a_reaped_process_ends_a_quarantine(patch: pytest.MonkeyPatch) -> None:
    def lose_dead(original: Any, end: DecodeEnd, number: int) -> None:
        boot = end._scene.connections[number].boot
        original(end, number)
        _settle_all_of(end, boot)

    wrap(patch, DecodeEnd, "lose_dead", lose_dead)


def time_ends_a_quarantine(patch: pytest.MonkeyPatch) -> None:
    def tick(original: Any, state: Any, now: float, *, starving: bool) -> Any:
        entries = {
            key: replace(entry, free_at=now) if now >= entry.since + state.quarantine_s else entry
            for key, entry in state.entries.items()
        }
        return original(replace(state, entries=entries), now, starving=starving)

    wrap(patch, quarantine, "_tick", tick)


def no_fence_is_made(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quarantine, "_fence_if_due", lambda state, now, *, starving: (state, ()))


def blocks_are_free_when_a_fence_begins(patch: pytest.MonkeyPatch) -> None:
    def fence(original: Any, state: Any, now: float, *, starving: bool) -> Any:
        fencing, effects = original(state, now, starving=starving)
        if not effects:
            return fencing, effects
        freed = tuple(quarantine.Free(handoff, 0.0) for handoff in state.entries)
        return replace(fencing, entries={}), (*effects, *freed)

    wrap(patch, quarantine, "_fence_if_due", fence)


def blocks_are_free_as_soon_as_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quarantine, "GRACE_S", 0.0)


def a_fence_frees_what_came_after_it(patch: pytest.MonkeyPatch) -> None:
    def enter(original: Any, state: Any, event: Any, now: float) -> Any:
        return original(state, replace(event, generation=-1), now)

    wrap(patch, quarantine, "_enter", enter)


def attempts_go_on_over_a_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decode_side, "_revoked", lambda state, event: (state, ()))


def sinks_go_with_the_fence(patch: pytest.MonkeyPatch) -> None:
    def release(original: Any, state: Any) -> Any:
        if state.has_sinks:
            return replace(state, has_sinks=False), (quarantine.ReleaseSinks(),)
        return state, ()

    wrap(patch, quarantine, "_release_sinks", release)


def sinks_go_while_a_fence_is_under_way(patch: pytest.MonkeyPatch) -> None:
    def release(original: Any, state: Any) -> Any:
        after, effects = original(replace(state, is_fencing=False))
        return replace(after, is_fencing=state.is_fencing), effects

    wrap(patch, quarantine, "_release_sinks", release)


def asks_go_out_while_a_fence_is_under_way(patch: pytest.MonkeyPatch) -> None:
    def fence(original: Any, end: DecodeEnd) -> None:
        original(end)
        scene = end._scene
        while scene.reserved:
            end.tell_reserved()

    wrap(patch, DecodeEnd, "move_region", fence)
