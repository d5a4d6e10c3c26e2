"""What the cache ledger's writer writes and what its readers believe, without I/O. Pure.

A worker's caches are a set of block hashes. Its ledger is a log of deltas of which etcd holds the
last one (and the earlier ones in its history, until they are compacted), and a snapshot that says
up to which delta it has everything:

    seq      ... 41   42   43   44        head: generation g, seq 42
    snapshot g ------->|                  a reader lists g, then takes the deltas 43, 44, ...

The ledger is a hint for routing. A reader that lost deltas says so once and goes on with what it
has, until the writer's next snapshot makes it whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, assert_never

from control_plane.ledger.records import (
    HASH_BYTES,
    CacheCounters,
    Delta,
    Head,
    HeadGone,
    Part,
    Record,
    join_hashes,
    split_hashes,
)
from core.block_hash import BlockHash
from core.ids import Boot, WorkerId

DELTA_HASHES = 16_384
"""A larger delta becomes a snapshot."""

SNAPSHOT_S = 60.0
"""The longest that a change lives in deltas alone, for a snapshot of up to 1 MiB; a larger one
proportionally longer. etcd's history must reach back so far for a new reader to know all."""

_AMORTIZED_BYTES = 64 << 10
"""Deltas of so many bytes, or of the snapshot's own size if that is more, are worth a snapshot."""


class WriteDelta(NamedTuple):
    """To be put in place of the last delta."""

    delta: Delta


class WriteSnapshot(NamedTuple):
    """To be put part by part, then made valid by a head in one transaction.

    Attributes:
        hashes: in no order that means anything; no hash is there twice.
    """

    generation: str
    seq: int
    hashes: Sequence[BlockHash]
    counters: CacheCounters


class WriterState:
    """The truth about one worker's caches, and how far the ledger tells it.

    It runs on the event loop: a snapshot of 100,000 hashes takes it 1 ms, and 5 ms with 10,000
    changes untold. Hence a dict and no set for the truth, which would take 20 ms to be copied.
    """

    def __init__(self, boot: Boot, *, now: float) -> None:
        self._boot = boot
        self._truth: dict[BlockHash, None] = {}
        self._stored: set[BlockHash] = set()
        self._evicted: set[BlockHash] = set()
        self._counters = CacheCounters()
        self._told_counters = self._counters
        self._seq = 0
        self._num_snapshots = 0
        self._must_snapshot = True
        self._delta_bytes = 0
        self._snapshot_at = now

    @property
    def hashes(self) -> frozenset[BlockHash]:
        """What the worker's caches hold."""
        return frozenset(self._truth)

    def change(self, stored: Iterable[BlockHash], evicted: Iterable[BlockHash]) -> None:
        """Take a step's news. A hash that is in both counts as stored."""
        for block_hash in evicted:
            if block_hash in self._truth:
                del self._truth[block_hash]
                if block_hash in self._stored:
                    self._stored.remove(block_hash)
                else:
                    self._evicted.add(block_hash)
        for block_hash in stored:
            if block_hash not in self._truth:
                self._truth[block_hash] = None
                if block_hash in self._evicted:
                    self._evicted.remove(block_hash)
                else:
                    self._stored.add(block_hash)

    @property
    def counters(self) -> CacheCounters:
        """The totals taken last."""
        return self._counters

    def count(self, counters: CacheCounters) -> None:
        """Take the totals since boot."""
        self._counters = counters

    @property
    def has_news(self) -> bool:
        """Whether something changed that was not written yet."""
        is_changed = bool(self._stored or self._evicted)
        return is_changed or self._must_snapshot or self._counters != self._told_counters

    def lost(self) -> None:
        """The keys are gone, or it is not known what a failed write did: begin with a snapshot."""
        self._must_snapshot = True

    def next_write(self, now: float) -> WriteDelta | WriteSnapshot | None:
        """Return what to write next; it counts as told until `lost`. None: all is told."""
        num_changed = len(self._stored) + len(self._evicted)
        if self._must_snapshot or num_changed > DELTA_HASHES:
            self._seq += 1
            self._forget_changes()
            return self._snapshot(list(self._truth), now)
        if self._delta_bytes and self._is_snapshot_due(now):
            # As of the last delta, so that a reader who has that one need not take it
            return self._snapshot(self._told(), now)
        if not self.has_news:
            return None
        self._seq += 1
        stored, evicted = join_hashes(self._stored), join_hashes(self._evicted)
        self._delta_bytes += max(1, len(stored) + len(evicted))
        self._forget_changes()
        return WriteDelta(Delta(self._boot, self._seq, stored, evicted, self._told_counters))

    def snapshot_due_at(self) -> float | None:
        """Return when `next_write` will want a snapshot though nothing changes; None: never."""
        if not self._delta_bytes:
            return None
        return self._snapshot_at + SNAPSHOT_S * max(1.0, len(self._truth) * HASH_BYTES / (1 << 20))

    def _told(self) -> list[BlockHash]:
        told = self._truth.copy()
        for block_hash in self._stored:
            del told[block_hash]
        return [*told, *self._evicted]

    def _forget_changes(self) -> None:
        self._stored.clear()
        self._evicted.clear()
        self._told_counters = self._counters

    def _is_snapshot_due(self, now: float) -> bool:
        due_at = self.snapshot_due_at()
        worth = max(_AMORTIZED_BYTES, len(self._truth) * HASH_BYTES)
        return self._delta_bytes >= worth or (due_at is not None and now >= due_at)

    def _snapshot(self, hashes: Sequence[BlockHash], now: float) -> WriteSnapshot:
        self._num_snapshots += 1
        self._must_snapshot = False
        self._delta_bytes = 0
        self._snapshot_at = now
        generation = f"{self._boot}-{self._num_snapshots}"
        return WriteSnapshot(generation, self._seq, hashes, self._told_counters)


class Snapshot(NamedTuple):
    """Everything that a worker's caches hold, in place of all that was told before."""

    worker_id: WorkerId
    boot: Boot
    hashes: list[BlockHash]


class Change(NamedTuple):
    """What a worker's caches gained and lost."""

    worker_id: WorkerId
    boot: Boot
    stored: list[BlockHash]
    evicted: list[BlockHash]


class Gone(NamedTuple):
    """A worker's ledger was deleted, with its lease as a rule."""

    worker_id: WorkerId


class Gap(NamedTuple):
    """Deltas of a worker were lost; listing again may bring them back."""

    worker_id: WorkerId


Effect = Snapshot | Change | Gone | Gap


class Entry(NamedTuple):
    """What one key of a worker's ledger says, since which revision."""

    worker_id: WorkerId
    record: Record
    mod_revision: int


class _Ledger:
    """What a reader has of one worker.

    Attributes:
        floor: changes up to this revision were taken, or are in what was listed.
        is_stale: deltas are missing.
        parts: of snapshots whose head has not come yet, by generation and number.
    """

    def __init__(self, floor: int) -> None:
        self.head: Head | None = None
        self.seq = 0
        self.counters = CacheCounters()
        self.is_stale = False
        self.floor = floor
        self.parts: dict[str, dict[int, bytes]] = {}

    def go_on_from(self, known: _Ledger | None) -> None:
        """Keep what a reader knew before it listed again; not if etcd has another history since."""
        if known is not None and known.floor <= self.floor:
            self.head, self.seq, self.is_stale = known.head, known.seq, known.is_stale
            self.counters, self.floor = known.counters, known.floor

    def take_part(self, part: Part) -> None:
        parts = self.parts.setdefault(part.generation, {})
        if part.joined is None:
            parts.pop(part.number, None)
        else:
            parts[part.number] = part.joined


class ReaderState:
    """What a reader believes of all workers."""

    def __init__(self) -> None:
        self._ledgers: dict[WorkerId, _Ledger] = {}
        self._listed_at = 0

    @property
    def counters(self) -> dict[WorkerId, CacheCounters]:
        """The totals that each worker told last."""
        return {
            worker_id: ledger.counters for worker_id, ledger in self._ledgers.items() if ledger.head
        }

    @property
    def stale(self) -> set[WorkerId]:
        """Workers of which deltas are missing until their next snapshot."""
        return {worker_id for worker_id, ledger in self._ledgers.items() if ledger.is_stale}

    def take_listing(
        self, entries: Sequence[Entry], revision: int, *, replay_from: int
    ) -> tuple[list[Effect], int]:
        """Take all keys as of `revision`. A worker of which nothing was missed has no effects.

        Args:
            replay_from: the first revision whose changes can be told again.

        Returns the effects, and the revision from which changes are to be told: earlier than the
        listing's when a worker's missing deltas are in etcd's history.
        """
        before, self._ledgers, self._listed_at = self._ledgers, {}, revision
        for entry in entries:
            if isinstance(entry.record, Part):
                self._ledger(entry.worker_id).take_part(entry.record)
        effects: list[Effect] = []
        for entry in entries:
            if isinstance(entry.record, Head):
                self._ledger(entry.worker_id).go_on_from(before.get(entry.worker_id))
                effects += self._take_head(entry, entry.record)
        start = revision + 1
        for entry in entries:
            if isinstance(entry.record, Delta):
                told, replay = self._take_listed_delta(entry, entry.record, replay_from)
                effects += told
                start = min(start, replay)
        gone = [w for w, ledger in sorted(before.items()) if ledger.head and not self._has(w)]
        return [*effects, *[Gone(worker_id) for worker_id in gone]], start

    def _take_listed_delta(
        self, entry: Entry, delta: Delta, replay_from: int
    ) -> tuple[list[Effect], int]:
        """Take the last delta, or return the revision from which it and those before can be told
        again."""
        ledger = self._ledger(entry.worker_id)
        is_behind = _is_behind(ledger, delta)
        if is_behind and ledger.floor + 1 >= replay_from:
            return [], ledger.floor + 1
        # What is compacted will not come by listing again: no Gap
        ledger.is_stale = ledger.is_stale or is_behind
        return self._take_delta(entry, delta), self._listed_at + 1

    def take_change(self, entry: Entry) -> list[Effect]:
        """Take one change, in the order of their revisions."""
        ledger = self._ledger(entry.worker_id)
        if entry.mod_revision <= ledger.floor:
            return []
        match entry.record:
            case Head():
                effects = self._take_head(entry, entry.record)
                ledger.parts.clear()  # of snapshots that were given up
                return effects
            case HeadGone():
                was_there = ledger.head is not None
                self._ledgers[entry.worker_id] = _Ledger(entry.mod_revision)
                return [Gone(entry.worker_id)] if was_there else []
            case Delta():
                return self._take_delta(entry, entry.record)
            case Part():
                ledger.take_part(entry.record)
                return []
            case _:
                assert_never(entry.record)

    def _ledger(self, worker_id: WorkerId) -> _Ledger:
        return self._ledgers.setdefault(worker_id, _Ledger(self._listed_at))

    def _has(self, worker_id: WorkerId) -> bool:
        ledger = self._ledgers.get(worker_id)
        return ledger is not None and ledger.head is not None

    def _take_head(self, entry: Entry, head: Head) -> list[Effect]:
        worker_id, ledger = entry.worker_id, self._ledger(entry.worker_id)
        parts = ledger.parts.pop(head.generation, {})
        known, ledger.head = ledger.head, head
        is_same_boot = known is not None and known.boot == head.boot
        if is_same_boot and not ledger.is_stale and ledger.seq >= head.seq:
            ledger.floor = max(ledger.floor, entry.mod_revision)
            return []  # nothing was missed; what was known before a listing may even be newer
        ledger.seq, ledger.floor, ledger.counters = head.seq, entry.mod_revision, head.counters
        was_stale, ledger.is_stale = ledger.is_stale, len(parts) != head.num_parts
        if not ledger.is_stale:
            joined = b"".join([parts[number] for number in sorted(parts)])
            return [Snapshot(worker_id, head.boot, split_hashes(joined))]
        forgotten = [] if is_same_boot else [Snapshot(worker_id, head.boot, [])]
        return [*forgotten, *([] if was_stale else [Gap(worker_id)])]

    def _take_delta(self, entry: Entry, delta: Delta) -> list[Effect]:
        worker_id, ledger = entry.worker_id, self._ledger(entry.worker_id)
        if ledger.head is None or delta.boot != ledger.head.boot or delta.seq <= ledger.seq:
            return []
        effects: list[Effect] = []
        if _is_behind(ledger, delta) and not ledger.is_stale:
            ledger.is_stale = True
            effects.append(Gap(worker_id))
        ledger.seq, ledger.floor, ledger.counters = delta.seq, entry.mod_revision, delta.counters
        stored, evicted = split_hashes(delta.stored), split_hashes(delta.evicted)
        return [*effects, Change(worker_id, delta.boot, stored, evicted)]


def _is_behind(ledger: _Ledger, delta: Delta) -> bool:
    is_ours = ledger.head is not None and ledger.head.boot == delta.boot
    return is_ours and delta.seq > ledger.seq + 1
