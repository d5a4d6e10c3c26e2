"""Whatever is lost, compacted, restarted or told twice: in the end the index equals the truth."""

from __future__ import annotations

from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from control_plane.ledger import state as ledger_state
from core.block_hash import BlockHash
from core.ids import WorkerId
from tests.ledger_ends import HASHES, WORKERS, FakeEtcd, Reader, Worker

SOME_HASHES = st.lists(st.sampled_from(HASHES), max_size=5)
A_WORKER = st.sampled_from(WORKERS)


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
