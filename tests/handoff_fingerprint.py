"""When two states of a handoff world are the same: what happens from here on cannot differ.

Clock readings count as time left until something is due, durations that are only reported do not
count, and neither do the words of a reason.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from core.messages import FirstTokens, HandoffFailed, HandoffRefused, PrefillAsk
from kv_transfer.handoff.decode_side import DecodeSide, Phase
from kv_transfer.handoff.prefill_side import PrefillSide
from kv_transfer.handoff.quarantine import Quarantine
from kv_transfer.handoff.tombstones import Tombstones
from tests.handoff_invariants import COPY_S
from tests.handoff_scene import (
    QUARANTINE_S,
    Connection,
    Prefill,
    Request,
    Scene,
    Write,
)

Fingerprint = tuple[Hashable, ...]


class Fingerprints:
    """Names states by numbers for their parts.

    The parts are values that thousands of states share, so each is looked at once.
    """

    def __init__(self) -> None:
        self._number_of: dict[Hashable, int] = {}
        self._known: dict[tuple[int, float], tuple[int, object]] = {}

    def forget_parts(self) -> None:
        """Let the parts that were seen go; their numbers stay."""
        self._known.clear()

    def of(self, scene: Scene) -> Fingerprint:
        """Return the same for two scenes from which the same can happen."""
        now, part = scene.now, self._part
        return (
            *scene.blocks.values(),
            tuple(scene.tables.items()),
            scene.waiting,
            tuple(event.handoff for event in scene.reserved),
            tuple(part(request, now) for request in scene.requests.values()),
            part(scene.quarantine, now),
            scene.generation,
            now < scene.moved_at + COPY_S,
            scene.fence,
            tuple((key, part(write, now)) for key, write in sorted(scene.writes.items())),
            tuple(sorted(part(note, now) for note in scene.notes)),
            tuple(part(prefill, now) for prefill in scene.prefills.values()),
            tuple((key, part(value, now)) for key, value in scene.connections.items()),
            scene.num_faults,
            scene.num_aborts,
        )

    def _part(self, value: object, now: float) -> int:
        known = self._known.get((id(value), now))
        if known is not None:
            return known[0]
        shape = self._shape(value, now)
        number = self._number_of.setdefault(shape, len(self._number_of))
        # The value is kept, so that no other one gets its address.
        self._known[id(value), now] = number, value
        return number

    def _shape(self, value: object, now: float) -> Hashable:
        match value:
            case Request():
                emitted = tuple(sorted(value.emitted.items()))
                side = self._part(value.side, now)
                return side, emitted, value.aborted, value.result
            case Prefill():
                return self._prefill(value, now)
            case Connection():
                sent = (value.to_prefill, value.to_decode)
                parts = tuple(tuple(self._part(m, now) for m in messages) for messages in sent)
                return value.boot, parts, value.is_open, value.is_lost_here
            case Write():
                return value.left, value.is_over, value.is_cut, value.note.generation
            case Quarantine():
                return _quarantine(value, now)
            case DecodeSide():
                return _decode_side(value, now)
            case PrefillSide():
                return _prefill_side(value, now)
            case _:
                return _message(value)

    def _prefill(self, value: Prefill, now: float) -> Hashable:
        sides = tuple((key, self._part(side, now)) for key, side in value.sides.items())
        return (
            sides,
            tuple(value.asked_on[handoff] for handoff in value.sides),
            tuple(value.computing.items()),
            tuple(value.held.items()),
            _tombstones(value.tombstones, value.asked_on),
            value.is_frozen,
            value.died_at is None or _left(value.died_at + QUARANTINE_S, now),
        )


def _left(due: float, now: float) -> float:
    return max(0.0, round(due - now, 2))


def _decode_side(side: DecodeSide, now: float) -> Hashable:
    if side.phase is Phase.ENDED:
        return side.handoff, side.phase, side.ended
    is_receiving = side.phase is Phase.RECEIVING
    return (
        side.handoff,
        side.phase,
        side.ended,
        side.request.outputs,
        side.candidate_index,
        side.repeated,
        tuple(sorted(side.arrivals.landed.items())),
        side.generation,
        is_receiving and _left(side.progress_at + side.terms.try_s, now),
        side.first_tokens,
        _left(side.terms.deadline, now),
    )


def _prefill_side(side: PrefillSide, now: float) -> Hashable:
    is_writing = bool(side.pending)
    is_stuck = side.stuck_since is not None and bool(side.pending or side.failed)
    return (
        side.stage,
        side.computed_at is None,
        tuple((sample.sample_index, sample.token_id) for sample in side.samples),
        side.sources,
        side.targets,
        side.ask.region.generation,
        side.pushed_to,
        side.num_posted,
        side.pending,
        side.failed,
        side.may_land,
        side.wants_answer,
        side.outcome,
        is_writing and _left(side.written_at + side.try_s, now),
        is_stuck and _left((side.stuck_since or 0.0) + 2 * QUARANTINE_S, now),
        _left(side.deadline, now),
    )


def _quarantine(value: Quarantine, now: float) -> Hashable:
    entries = tuple(
        (
            entry.handoff,
            entry.generation,
            _left(entry.since + QUARANTINE_S, now),
            entry.free_at is not None and _left(entry.free_at, now),
        )
        for entry in value.entries.values()
    )
    unsettled = tuple(
        (handoff, late.peer, late.is_gone and _left(late.poll_until, now))
        for handoff, late in value.unsettled.items()
    )
    return value.generation, value.is_fencing, value.has_sinks, entries, unsettled


def _tombstones(stones: Tombstones, asked: Any) -> Hashable:
    return tuple((handoff, handoff in stones, stones.may_land(handoff)) for handoff in asked)


def _message(value: object) -> Hashable:
    match value:
        case PrefillAsk():
            return "ask", value.handoff, value.blocks, value.region.generation
        case FirstTokens():
            return "tokens", value.handoff, value.token_ids, value.finish_reasons
        case HandoffRefused() | HandoffFailed():
            return type(value).__name__, value.handoff
        case _:
            return type(value).__name__, value
