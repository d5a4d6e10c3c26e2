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

Afterwards the old addresses are sinks. They stay mapped until every attempt that knew one settled,
or its peer's process is gone, and never go during a fence: writing to an unmapped address killed
the target.

The owner of the memory goes on polling the fabric for ended attempts (`must_poll`): a write to a
target that does not poll stays pending at its writer, which then can neither settle it nor let go
of its own blocks.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec.structs import replace

from core.ids import Boot, HandoffId, WorkerId

GRACE_S = 0.02
"""Between a fence and the reuse of blocks, for copies that the kernel was in the middle of."""

PRESSURE_S = 0.25
"""Age at which an entry is fenced when requests wait for blocks; most peers settle sooner."""

POLL_S = 60.0
"""How long a peer that did not settle is polled for after a fence, or after it was heard of again.
One that is frozen for longer must not cost processor time for ever."""

DRAIN_S = 5.0
"""From a peer's end until its sinks go: what a dead writer had buffered lands in them meanwhile."""


# --- events -------------------------------------------------------------------------------------


class Enter(msgspec.Struct, frozen=True):
    """An attempt that was asked ended; `generation` is of the region that it was told."""

    handoff: HandoffId
    worker_id: WorkerId
    peer: Boot
    generation: int


class Settled(msgspec.Struct, frozen=True):
    """The peer says that nothing of this attempt can land any more."""

    handoff: HandoffId


class Fenced(msgspec.Struct, frozen=True):
    """The fence is done; `generation` is the region's new one."""

    generation: int


class PeerHeard(msgspec.Struct, frozen=True):
    """A peer is reachable, perhaps again: it may now end what it had begun."""

    peer: Boot


class PeerGone(msgspec.Struct, frozen=True):
    """A peer's process ended for certain. Only what it had buffered may still land."""

    peer: Boot


class Tick(msgspec.Struct, frozen=True):
    """Time passed. `starving`: requests wait for blocks."""

    starving: bool


Event = Enter | Settled | Fenced | PeerHeard | PeerGone | Tick


# --- effects ------------------------------------------------------------------------------------


class StartFence(msgspec.Struct, frozen=True):
    """Revoke the region's generation at every open attempt, then move the region."""


class Free(msgspec.Struct, frozen=True):
    """End the quarantine of this attempt's blocks."""

    handoff: HandoffId
    seconds: float


class ReleaseSinks(msgspec.Struct, frozen=True):
    """Nobody who knew an old address can write any more."""


Effect = StartFence | Free | ReleaseSinks


class Entry(msgspec.Struct, frozen=True):
    """One attempt's blocks. `free_at`: known once they were fenced."""

    handoff: HandoffId
    worker_id: WorkerId
    peer: Boot
    generation: int
    since: float
    free_at: float | None = None


class Unsettled(msgspec.Struct, frozen=True):
    """An attempt that a fence alone freed: its peer still knows an old address.

    Attributes:
        poll_until: the fabric is polled for its writes until then.
        is_gone: its peer's process ended; the attempt is forgotten at `poll_until`.
    """

    worker_id: WorkerId
    peer: Boot
    poll_until: float
    is_gone: bool = False


class Quarantine(msgspec.Struct, frozen=True):
    """The state of one region.

    Attributes:
        generation: the region's.
        entries: by attempt, oldest first.
        unsettled: attempts that were freed by a fence alone.
        has_sinks: old addresses are still mapped.
    """

    quarantine_s: float
    generation: int = 0
    is_fencing: bool = False
    entries: dict[HandoffId, Entry] = {}
    unsettled: dict[HandoffId, Unsettled] = {}
    has_sinks: bool = False

    def handoffs_of(self, peer: Boot) -> tuple[HandoffId, ...]:
        """Return what is still to be settled by a peer, to ask again when it is reachable."""
        held = tuple(entry.handoff for entry in self.entries.values() if entry.peer == peer)
        return held + tuple(key for key, late in self.unsettled.items() if late.peer == peer)

    @property
    def sink_holders(self) -> set[tuple[WorkerId, Boot]]:
        """Who may still write to old addresses, as far as is known, though its blocks are free."""
        late = self.unsettled.values()
        return {(attempt.worker_id, attempt.peer) for attempt in late if not attempt.is_gone}

    def must_poll(self, now: float) -> bool:
        """Whether a peer's write may wait for this side to poll the fabric."""
        return bool(self.entries) or any(now < late.poll_until for late in self.unsettled.values())


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
        case PeerHeard():
            return _poll_for(state, event.peer, now + POLL_S, is_gone=False), ()
        case PeerGone():
            return _poll_for(state, event.peer, now + DRAIN_S, is_gone=True), ()
        case Tick():
            return _tick(state, now, starving=event.starving)
        case _:
            assert_never(event)


def _enter(state: Quarantine, event: Enter, now: float) -> Quarantine:
    free_at = now + GRACE_S if event.generation < state.generation else None
    entry = Entry(
        handoff=event.handoff,
        worker_id=event.worker_id,
        peer=event.peer,
        generation=event.generation,
        since=now,
        free_at=free_at,
    )
    return replace(state, entries={**state.entries, event.handoff: entry})


def _settled(state: Quarantine, handoff: HandoffId, now: float) -> Step:
    entry = state.entries.get(handoff)
    state = replace(
        state,
        entries={key: kept for key, kept in state.entries.items() if key != handoff},
        unsettled={key: late for key, late in state.unsettled.items() if key != handoff},
    )
    state, released = _release_sinks(state)
    return state, released if entry is None else (Free(handoff, now - entry.since), *released)


def _release_sinks(state: Quarantine) -> Step:
    """Unmap old addresses that nobody knows. During a fence, the region's current address may have
    become one already, and every attempt of the current generation knows that."""
    if state.is_fencing:
        return state, ()
    is_known = any(kept.generation < state.generation for kept in state.entries.values())
    if not state.has_sinks or state.unsettled or is_known:
        return state, ()
    return replace(state, has_sinks=False), (ReleaseSinks(),)


def _poll_for(state: Quarantine, peer: Boot, until: float, *, is_gone: bool) -> Quarantine:
    unsettled = {
        handoff: replace(late, poll_until=until, is_gone=is_gone)
        if late.peer == peer and not late.is_gone
        else late
        for handoff, late in state.unsettled.items()
    }
    return replace(state, unsettled=unsettled)


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
    freed = tuple(Free(handoff, now - entry.since) for handoff, entry in over.items())
    late = {
        handoff: Unsettled(entry.worker_id, entry.peer, now + POLL_S)
        for handoff, entry in over.items()
    }
    kept = {
        handoff: attempt
        for handoff, attempt in state.unsettled.items()
        if not (attempt.is_gone and now >= attempt.poll_until)
    }
    state = replace(
        state,
        entries={key: entry for key, entry in state.entries.items() if key not in over},
        unsettled={**kept, **late},
    )
    state, released = _release_sinks(state)
    state, fencing = _fence_if_due(state, now, starving=starving)
    return state, (*freed, *released, *fencing)


def _fence_if_due(state: Quarantine, now: float, *, starving: bool) -> Step:
    patience = min(PRESSURE_S, state.quarantine_s) if starving else state.quarantine_s
    is_due = any(
        entry.free_at is None and now >= entry.since + patience for entry in state.entries.values()
    )
    if not is_due or state.is_fencing:
        return state, ()
    return replace(state, is_fencing=True), (StartFence(),)
