"""What a ledger's writer tells, and what a reader makes of histories with holes."""

from __future__ import annotations

from unittest import mock

import msgspec
import pytest

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
    Gap,
    Snapshot,
    WriteDelta,
    WriterState,
    WriteSnapshot,
)
from core.block_hash import BlockHash
from core.ids import Boot
from tests.ledger_ends import HASHES, WORKERS, FakeEtcd, Reader, Worker


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
