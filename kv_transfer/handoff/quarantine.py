"""Blocks that a late write may still reach, at the worker that owns them.

    abandoned attempt -> HELD --- settled ----------------------------------> freed
                           |
                           | quarantine_s (sooner when requests starve for blocks)
                           v
              StartFence -> FENCING -> Fenced (new region generation) -> 20 ms -> freed

An entry never ends by a lost lease, a closed socket or a peer that was seen dead: bytes of a
killed writer still landed from socket buffers. A fence moves the whole region, so it ends every
entry of an older generation, whoever the peer was, and every attempt under way is retried. The copy
that the kernel was in the middle of may hold pages a little longer, hence the 20 ms.

Afterwards the old addresses are sinks. They stay mapped until every attempt that knew one settled:
writing to an unmapped address killed the target.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec.structs import replace

from core.ids import Boot, HandoffId

GRACE_S = 0.02
"""Between a fence and the reuse of blocks, for copies that the kernel was in the middle of."""

PRESSURE_S = 0.25
"""Age at which an entry is fenced when requests wait for blocks; most peers settle sooner."""


# --- events -------------------------------------------------------------------------------------


class Enter(msgspec.Struct, frozen=True):
    """An attempt that was asked ended; `generation` is of the region that it was told."""

    handoff: HandoffId
    peer: Boot
    generation: int


class Settled(msgspec.Struct, frozen=True):
    """The peer says that nothing of this attempt can land any more."""

    handoff: HandoffId


class Fenced(msgspec.Struct, frozen=True):
    """The fence is done; `generation` is the region's new one."""

    generation: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed. `starving`: requests wait for blocks."""

    starving: bool


Event = Enter | Settled | Fenced | Tick


# --- effects ------------------------------------------------------------------------------------


class StartFence(msgspec.Struct, frozen=True):
    """Revoke the region's generation at every open attempt, then move the region."""


class Free(msgspec.Struct, frozen=True):
    """End the quarantine of this attempt's blocks."""

    handoff: HandoffId
    seconds: float


class ReleaseSinks(msgspec.Struct, frozen=True):
    """No attempt that knew an old address can write any more."""


Effect = StartFence | Free | ReleaseSinks


class Entry(msgspec.Struct, frozen=True):
    """One attempt's blocks. `free_at`: known once they were fenced."""

    handoff: HandoffId
    peer: Boot
    generation: int
    since: float
    free_at: float | None = None


class Quarantine(msgspec.Struct, frozen=True):
    """The state of one region.

    Attributes:
        generation: the region's.
        entries: by attempt, oldest first.
        unsettled: attempts that were freed by a fence alone; their peers still know old addresses.
        has_sinks: old addresses are still mapped.
    """

    quarantine_s: float
    generation: int = 0
    is_fencing: bool = False
    entries: dict[HandoffId, Entry] = {}
    unsettled: frozenset[HandoffId] = frozenset()
    has_sinks: bool = False

    def handoffs_of(self, peer: Boot) -> tuple[HandoffId, ...]:
        """Return what is still to be settled by a peer, to ask again when it is reachable."""
        return tuple(entry.handoff for entry in self.entries.values() if entry.peer == peer)


Step = tuple[Quarantine, tuple[Effect, ...]]


def advance(state: Quarantine, event: Event, now: float) -> Step:
    """Return the state after `event` at monotonic second `now`, and what to do, in order."""
    match event:
        case Enter():
            return _enter(state, event, now), ()
        case Settled():
            return _settled(state, event.handoff, now)
        case Fenced():
            return _fenced(state, event.generation, now), ()
        case Tick():
            return _tick(state, now, starving=event.starving)
        case _:
            assert_never(event)


def _enter(state: Quarantine, event: Enter, now: float) -> Quarantine:
    free_at = now + GRACE_S if event.generation < state.generation else None
    entry = Entry(event.handoff, event.peer, event.generation, now, free_at)
    return replace(state, entries={**state.entries, event.handoff: entry})


def _settled(state: Quarantine, handoff: HandoffId, now: float) -> Step:
    entry = state.entries.get(handoff)
    state = replace(
        state,
        entries={key: kept for key, kept in state.entries.items() if key != handoff},
        unsettled=state.unsettled - {handoff},
    )
    freed: tuple[Effect, ...] = () if entry is None else (Free(handoff, now - entry.since),)
    is_known = any(kept.generation < state.generation for kept in state.entries.values())
    if not state.has_sinks or state.unsettled or is_known:
        return state, freed
    return replace(state, has_sinks=False), (*freed, ReleaseSinks())


def _fenced(state: Quarantine, generation: int, now: float) -> Quarantine:
    entries = {
        handoff: replace(entry, free_at=now + GRACE_S) if entry.generation < generation else entry
        for handoff, entry in state.entries.items()
    }
    return replace(state, generation=generation, is_fencing=False, entries=entries, has_sinks=True)


def _tick(state: Quarantine, now: float, *, starving: bool) -> Step:
    over = {
        handoff: entry
        for handoff, entry in state.entries.items()
        if entry.free_at is not None and now >= entry.free_at
    }
    freed: list[Effect] = [Free(handoff, now - entry.since) for handoff, entry in over.items()]
    state = replace(
        state,
        entries={key: entry for key, entry in state.entries.items() if key not in over},
        unsettled=state.unsettled | over.keys(),
    )
    patience = min(PRESSURE_S, state.quarantine_s) if starving else state.quarantine_s
    is_due = any(
        entry.free_at is None and now >= entry.since + patience for entry in state.entries.values()
    )
    if is_due and not state.is_fencing:
        return replace(state, is_fencing=True), (*freed, StartFence())
    return state, tuple(freed)
