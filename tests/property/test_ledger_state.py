"""Whatever is lost, compacted, restarted or told twice: in the end the index equals the truth.

etcd is a dictionary with a history. The reader follows it as `PrefixWatch` does: it lists, hears
changes from the revision that it asked for, and lists again when these are compacted.
"""

from __future__ import annotations

from unittest import mock

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from control_plane.ledger import state as ledger_state
from control_plane.ledger.records import (
    CacheCounters,
    Delta,
    Head,
    decode,
    join_hashes,
    snapshot_parts,
)
from control_plane.ledger.state import (
    Change,
    Effect,
    Entry,
    Gap,
    Gone,
    ReaderState,
    Snapshot,
    WriteDelta,
    WriterState,
    WriteSnapshot,
)
from core.block_hash import BlockHash
from core.ids import Boot, WorkerId

HASHES = [BlockHash(bytes([index]) * 16) for index in range(10)]
WORKERS = [WorkerId("w0"), WorkerId("w1")]
SOME_HASHES = st.lists(st.sampled_from(HASHES), max_size=5)
A_WORKER = st.sampled_from(WORKERS)
Key = tuple[WorkerId, str]


class FakeEtcd:
    """Keys, and their history since the last compaction."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.keys: dict[Key, tuple[bytes, int]] = {}
        self.history: list[tuple[int, Key, bytes | None]] = []

    def commit(self, *changes: tuple[Key, bytes | None]) -> None:
        self.revision += 1
        for key, value in changes:
            if value is None:
                self.keys.pop(key, None)
            else:
                self.keys[key] = (value, self.revision)
            self.history.append((self.revision, key, value))

    def since(self, revision: int) -> list[tuple[int, Key, bytes | None]]:
        return [change for change in self.history if change[0] >= revision]


class Worker:
    """A writer whose I/O the test does."""

    def __init__(self, etcd: FakeEtcd, worker_id: WorkerId, life: int) -> None:
        self.etcd = etcd
        self.worker_id = worker_id
        self.boot = Boot(f"{worker_id}-life{life}")
        self.state = WriterState(self.boot, now=0.0)

    def write(self, now: float, outcome: str) -> bool:
        """Return whether there was something to write; "failed" may have happened or not."""
        write = self.state.next_write(now)
        if write is None:
            return False
        if outcome != "failed without effect":
            self.apply(write)
        if outcome != "ok":
            self.state.lost()
        return True

    def apply(self, write: WriteDelta | WriteSnapshot) -> None:
        if isinstance(write, WriteDelta):
            value = msgspec.msgpack.encode(write.delta)
            return self.etcd.commit(((self.worker_id, "delta"), value))
        parts = list(snapshot_parts(write.hashes))
        assert len(set(write.hashes)) == len(write.hashes)
        prefix = f"snap/{write.generation}/"
        for number, part in enumerate(parts):
            self.etcd.commit(((self.worker_id, f"{prefix}{number}"), part))
        head = Head(self.boot, write.generation, write.seq, len(parts), write.counters)
        old = [
            key
            for key in self.etcd.keys
            if key[0] == self.worker_id and key[1].startswith("snap/") and prefix not in key[1]
        ]
        return self.etcd.commit(
            ((self.worker_id, "head"), msgspec.msgpack.encode(head)),
            *[(key, None) for key in old],
        )


class Reader:
    """A reader whose I/O the test does, and the index that its effects make."""

    def __init__(self, etcd: FakeEtcd) -> None:
        self.etcd = etcd
        self.state = ReaderState()
        self.index: dict[WorkerId, tuple[Boot, set[BlockHash]]] = {}
        self.must_list = False
        self.known_compacted = 0
        self.list_now()

    def list_now(self) -> None:
        self.must_list = False
        entries = [
            entry
            for key, (value, revision) in sorted(self.etcd.keys.items())
            if (entry := entry_of(key, value, revision)) is not None
        ]
        effects, self.next_revision = self.state.take_listing(
            entries, self.etcd.revision, replay_from=self.known_compacted + 1
        )
        assert self.known_compacted < self.next_revision <= self.etcd.revision + 1
        self.take(effects)

    def hear(self, num_revisions: int) -> None:
        """Hear some changes, or, as a watch that begins in compacted history, list again."""
        if self.next_revision <= self.etcd.compacted:
            self.known_compacted = self.etcd.compacted
            return self.list_now()
        end = min(self.next_revision + num_revisions, self.etcd.revision + 1)
        for revision, key, value in self.etcd.since(self.next_revision):
            entry = entry_of(key, value, revision) if revision < end else None
            if entry is not None:
                self.take(self.state.take_change(entry))
        self.next_revision = max(self.next_revision, end)
        return None

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Snapshot():
                    self.index[effect.worker_id] = (effect.boot, set(effect.hashes))
                case Change():
                    boot, hashes = self.index[effect.worker_id]
                    assert boot == effect.boot, "a change of a boot without its snapshot"
                    assert not set(effect.stored) & set(effect.evicted)
                    hashes |= set(effect.stored)
                    hashes -= set(effect.evicted)
                case Gone():
                    del self.index[effect.worker_id]
                case Gap():
                    self.must_list = True


def entry_of(key: Key, value: bytes | None, revision: int) -> Entry | None:
    record = decode(key[1], value)
    return None if record is None else Entry(key[0], record, revision)


class LedgerMachine(RuleBasedStateMachine):
    """Two workers, one etcd, one reader."""

    def __init__(self) -> None:
        super().__init__()
        self.small = [
            mock.patch.object(ledger_state, "DELTA_HASHES", 3),
            mock.patch.object(ledger_state, "_AMORTIZED_BYTES", 48),
        ]
        for patch in self.small:
            patch.start()
        self.now = 0.0
        self.lives = 0
        self.etcd = FakeEtcd()
        self.workers = {worker_id: self.born(worker_id) for worker_id in WORKERS}
        self.reader = Reader(self.etcd)

    def born(self, worker_id: WorkerId) -> Worker:
        self.lives += 1
        return Worker(self.etcd, worker_id, self.lives)

    @rule(worker_id=A_WORKER, stored=SOME_HASHES, evicted=SOME_HASHES)
    def step(self, worker_id: WorkerId, stored: list[BlockHash], evicted: list[BlockHash]) -> None:
        state = self.workers[worker_id].state
        expected = state.hashes - set(evicted) | set(stored)
        state.change(stored, evicted)
        assert state.hashes == expected

    @rule(
        worker_id=A_WORKER,
        outcome=st.sampled_from(["ok", "ok", "ok", "failed", "failed without effect"]),
    )
    def write(self, worker_id: WorkerId, outcome: str) -> None:
        self.workers[worker_id].write(self.now, outcome)

    @rule(seconds=st.sampled_from([0.1, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(worker_id=A_WORKER)
    def worker_restarts(self, worker_id: WorkerId) -> None:
        self.workers[worker_id] = self.born(worker_id)

    @rule(worker_id=A_WORKER)
    def lease_is_lost(self, worker_id: WorkerId) -> None:
        lost = [key for key in self.etcd.keys if key[0] == worker_id]
        if lost:
            self.etcd.commit(*[(key, None) for key in lost])
        self.workers[worker_id].state.lost()

    @rule()
    def history_is_compacted(self) -> None:
        self.etcd.compacted = self.etcd.revision
        self.etcd.history.clear()

    @rule(num_revisions=st.integers(1, 5))
    def reader_hears(self, num_revisions: int) -> None:
        self.reader.hear(num_revisions)

    @rule(num_revisions=st.integers(1, 3))
    def reader_misses(self, num_revisions: int) -> None:
        """A watch should not; the poll then finds it behind."""
        self.reader.next_revision = min(
            self.reader.next_revision + num_revisions, self.etcd.revision + 1
        )
        self.reader.must_list = True

    @rule()
    def reader_lists_again(self) -> None:
        self.reader.list_now()

    @rule()
    def reader_restarts(self) -> None:
        self.reader = Reader(self.etcd)

    @rule()
    def reader_catches_up(self) -> None:
        """No time passes, so that no snapshot helps: only what was compacted may be missing."""
        for worker in self.workers.values():
            while worker.write(self.now, "ok"):
                pass
        for _ in range(2):
            self.reader.hear(10**6)
            self.reader.hear(10**6)
            if self.reader.must_list:
                self.reader.list_now()
        stale = self.reader.state.stale
        assert not stale or self.etcd.compacted
        for worker_id in set(WORKERS) - stale:
            worker = self.workers[worker_id]
            assert self.reader.index[worker_id] == (worker.boot, set(worker.state.hashes))

    @rule()
    def all_settles(self) -> None:
        self.now += 1000.0
        for worker in self.workers.values():
            while worker.write(self.now, "ok"):
                pass
        self.reader.hear(10**6)
        self.reader.hear(10**6)  # the first may have found its history compacted
        if self.reader.must_list:
            self.reader.list_now()
            self.reader.hear(10**6)
        assert self.reader.index == {
            worker_id: (worker.boot, set(worker.state.hashes))
            for worker_id, worker in self.workers.items()
        }
        assert not self.reader.state.stale
        kept = [ledger.parts for ledger in self.reader.state._ledgers.values()]
        assert not any(kept), "parts of snapshots that nobody will complete"

    @invariant()
    def a_listing_reaches_back_only_as_far_as_needed(self) -> None:
        assert self.reader.next_revision <= self.etcd.revision + 1

    def teardown(self) -> None:
        self.all_settles()
        for patch in self.small:
            patch.stop()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_quiet_ledger_is_not_written_again() -> None:
    state = WriterState(Boot("b"), now=0.0)
    assert isinstance(state.next_write(0.0), WriteSnapshot)
    assert state.next_write(10**6) is None
    assert state.snapshot_due_at() is None
    state.change([HASHES[0]], [])
    assert isinstance(state.next_write(1.0), WriteDelta)
    assert state.next_write(2.0) is None
    assert state.snapshot_due_at() == ledger_state.SNAPSHOT_S
    assert isinstance(state.next_write(ledger_state.SNAPSHOT_S), WriteSnapshot)
    assert state.next_write(10**6) is None


def test_what_comes_and_goes_between_two_writes_is_not_told() -> None:
    state = WriterState(Boot("b"), now=0.0)
    state.next_write(0.0)
    state.change([HASHES[0]], [])
    state.change([], [HASHES[0]])
    assert state.next_write(1.0) is None


def test_counters_alone_are_told() -> None:
    state = WriterState(Boot("b"), now=0.0)
    state.next_write(0.0)
    counters = CacheCounters({"local_cache": 16}, preemptions=1)
    state.count(counters)
    assert state.next_write(1.0) == WriteDelta(Delta(Boot("b"), 2, b"", b"", counters))


def test_a_new_reader_hears_all_deltas_since_the_snapshot() -> None:
    etcd = FakeEtcd()
    worker = Worker(etcd, WORKERS[0], 1)
    for block_hash in HASHES:
        worker.state.change([block_hash], [])
        worker.write(0.0, "ok")
    reader = Reader(etcd)
    assert reader.index[WORKERS[0]][1] == set(HASHES[:1])
    reader.hear(100)
    assert reader.index[WORKERS[0]][1] == set(HASHES)


def test_parts_are_below_etcds_limit_and_join_again() -> None:
    hashes = [BlockHash(index.to_bytes(16, "big")) for index in range(130_000)]
    parts = list(snapshot_parts(hashes))
    assert [len(part) < 1 << 20 for part in parts] == [True] * 3
    assert b"".join(parts) == join_hashes(hashes)


@pytest.mark.parametrize("name", ["delta", "snap/g/0"])
def test_half_a_hash_is_refused_before_anybody_splits_it(name: str) -> None:
    delta = Delta(Boot("b"), 1, b"stored", b"", CacheCounters())
    value = msgspec.msgpack.encode(delta) if name == "delta" else b"joined"
    with pytest.raises(ValueError, match="6 bytes are no list of 16-byte hashes"):
        decode(name, value)


def test_the_same_totals_again_are_no_news() -> None:
    state = WriterState(Boot("b"), now=0.0)
    state.next_write(0.0)
    assert not state.has_news
    state.count(CacheCounters({"local_cache": 16}))
    assert state.has_news
    state.next_write(1.0)
    state.count(CacheCounters({"local_cache": 16}))
    assert not state.has_news


def test_a_routine_snapshot_holds_what_deltas_told_and_no_more() -> None:
    etcd = FakeEtcd()
    worker = Worker(etcd, WORKERS[0], 1)
    worker.write(0.0, "ok")
    worker.state.change(HASHES[:1], [])
    worker.write(1.0, "ok")
    worker.state.change(HASHES[1:2], HASHES[:1])
    worker.write(1000.0, "ok")  # the snapshot is due first
    reader = Reader(etcd)
    assert reader.index[WORKERS[0]][1] == set(HASHES[:1])
    worker.state.change(HASHES[:1], HASHES[1:2])  # nothing is left to tell
    assert not worker.write(1001.0, "ok")
    assert reader.index[WORKERS[0]][1] == worker.state.hashes


def test_a_gap_is_told_once_and_ends_with_a_snapshot() -> None:
    etcd = FakeEtcd()
    worker = Worker(etcd, WORKERS[0], 1)
    worker.write(0.0, "ok")
    reader = Reader(etcd)
    for block_hash in HASHES[:4]:
        worker.state.change([block_hash], [])
        worker.write(1.0, "ok")
    reader.next_revision += 1
    told: list[Effect] = []
    with mock.patch.object(reader, "take", told.extend):
        reader.hear(100)
    assert [type(effect) for effect in told] == [Gap, Change, Change, Change]
    assert reader.state.stale == {WORKERS[0]}
    worker.state.lost()
    worker.write(2.0, "ok")
    reader.hear(100)
    assert reader.index[WORKERS[0]][1] == set(HASHES[:4])
    assert not reader.state.stale


def a_reader_who_missed(num_missed: int) -> tuple[FakeEtcd, Worker, Reader]:
    """A reader who knows the snapshot and two deltas, and missed those after."""
    etcd = FakeEtcd()
    worker = Worker(etcd, WORKERS[0], 1)
    worker.write(0.0, "ok")
    reader = Reader(etcd)
    for number, block_hash in enumerate(HASHES[: 2 + num_missed]):
        worker.state.change([block_hash], [])
        worker.write(0.0, "ok")
        if number < 2:
            reader.hear(1)
    reader.next_revision = etcd.revision + 1
    return etcd, worker, reader


@pytest.mark.parametrize("num_missed", [0, 3])
def test_listing_again_tells_only_what_was_missed(num_missed: int) -> None:
    """A snapshot of each worker anew would keep a router's event loop for long."""
    etcd, _, reader = a_reader_who_missed(num_missed)
    told: list[Effect] = []
    with mock.patch.object(reader, "take", told.extend):
        reader.list_now()
        reader.hear(100)
        reader.list_now()
        reader.hear(100)
    assert [type(effect) for effect in told] == [Change] * num_missed
    assert reader.next_revision == etcd.revision + 1
    assert not reader.state.stale


@pytest.mark.parametrize(("compacted_before_the_end", "is_whole"), [(4, True), (1, False)])
def test_of_a_compacted_history_what_is_left_is_replayed(
    compacted_before_the_end: int, is_whole: bool
) -> None:
    etcd, worker, reader = a_reader_who_missed(4)
    etcd.compacted = etcd.revision - compacted_before_the_end - 1
    etcd.history = etcd.since(etcd.compacted + 1)
    reader.known_compacted = etcd.compacted
    reader.list_now()
    reader.hear(100)
    assert (reader.state.stale == set()) == is_whole
    assert (reader.index[WORKERS[0]][1] == worker.state.hashes) == is_whole


def test_an_older_history_is_not_mistaken_for_what_is_known() -> None:
    """An etcd restored from a backup has revisions again that the reader has heard of."""
    etcd, worker, reader = a_reader_who_missed(0)
    restored = FakeEtcd()
    restored.keys = {key: (value, 2) for key, (value, _) in etcd.keys.items() if key[1] == "head"}
    restored.revision = 2
    reader.etcd = worker.etcd = restored
    reader.list_now()
    worker.state.change(HASHES[8:], HASHES[:1])
    worker.state.lost()
    worker.write(1.0, "ok")
    reader.hear(100)
    assert restored.revision <= etcd.revision
    assert reader.index[WORKERS[0]][1] == worker.state.hashes


def test_a_listing_amid_a_snapshot_keeps_its_parts() -> None:
    etcd = FakeEtcd()
    worker = Worker(etcd, WORKERS[0], 1)
    worker.write(0.0, "ok")
    worker.state.change(HASHES, [])
    worker.state.lost()
    write = worker.state.next_write(1.0)
    assert isinstance(write, WriteSnapshot)
    etcd.commit(((WORKERS[0], f"snap/{write.generation}/0"), join_hashes(write.hashes)))
    reader = Reader(etcd)
    told: list[Effect] = []
    head = Head(worker.boot, write.generation, write.seq, 1, write.counters)
    etcd.commit(((WORKERS[0], "head"), msgspec.msgpack.encode(head)))
    with mock.patch.object(reader, "take", told.extend):
        reader.hear(100)
    assert [type(effect) for effect in told] == [Snapshot]


def test_a_snapshot_whose_parts_were_missed_is_listed() -> None:
    etcd = FakeEtcd()
    worker = Worker(etcd, WORKERS[0], 1)
    worker.write(0.0, "ok")
    reader = Reader(etcd)
    worker.state.change(HASHES, [])
    worker.state.lost()
    worker.write(1.0, "ok")
    reader.next_revision = etcd.revision  # only the head is heard
    reader.hear(1)
    assert reader.must_list
    assert reader.index[WORKERS[0]][1] == set(), "what was known holds until then"
    reader.list_now()
    assert reader.index[WORKERS[0]][1] == set(HASHES)


def test_parts_of_a_snapshot_that_was_given_up_are_forgotten() -> None:
    etcd = FakeEtcd()
    worker = Worker(etcd, WORKERS[0], 1)
    reader = Reader(etcd)
    for number in range(2):
        etcd.commit(((WORKERS[0], f"snap/given-up/{number}"), join_hashes(HASHES)))
    etcd.commit(((WORKERS[0], "snap/given-up/1"), None))
    reader.hear(100)
    assert [*reader.state._ledgers[WORKERS[0]].parts["given-up"]] == [0]
    worker.write(0.0, "ok")
    reader.hear(100)
    assert reader.state._ledgers[WORKERS[0]].parts == {}


def test_replaying_one_workers_history_does_not_retell_another_s() -> None:
    etcd = FakeEtcd()
    quiet, busy = (Worker(etcd, worker_id, 1) for worker_id in WORKERS)
    busy.write(0.0, "ok")
    for _ in range(2):
        quiet.state.change(HASHES, [])
        quiet.write(0.0, "ok")
        quiet.state.lost()
    for block_hash in HASHES[:3]:
        busy.state.change([block_hash], [])
        busy.write(0.0, "ok")
    reader = Reader(etcd)
    told: list[Effect] = []
    with mock.patch.object(reader, "take", told.extend):
        reader.hear(100)
    assert [effect.worker_id for effect in told] == [WORKERS[1]] * 3


def test_a_worker_that_a_listing_lacks_is_gone() -> None:
    etcd = FakeEtcd()
    Worker(etcd, WORKERS[0], 1).write(0.0, "ok")
    reader = Reader(etcd)
    etcd.commit(*[(key, None) for key in etcd.keys])
    reader.list_now()
    assert reader.index == {}
