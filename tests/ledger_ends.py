"""Both ends of the ledger and the etcd between them, as values: a dictionary with a history.

The reader follows it as `PrefixWatch` does: it lists, hears changes from the revision that it asked
for, and lists again when these are compacted."""

from __future__ import annotations

import msgspec

from control_plane.ledger.records import (
    Head,
    decode,
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
