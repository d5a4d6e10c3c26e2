"""The cache ledger over a real etcd: writer, reader, restarts, lost leases, compaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator

import msgspec
import pytest

from control_plane.etcd.client import EtcdClient
from control_plane.etcd.values import KeyValue, Put
from control_plane.ledger import records as ledger_records
from control_plane.ledger.reader import LedgerReader
from control_plane.ledger.records import CacheCounters, Delta
from control_plane.ledger.writer import LedgerWriter
from control_plane.preemptions import Preemption, watch_preemptions
from control_plane.registration import RegistrationHandle
from control_plane.registry import Registry
from core.block_hash import BlockHash
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.ids import Boot, RequestId, WorkerId
from core.worker_record import Role, WorkerRecord
from tests.etcd_server import EtcdServer

pytestmark = pytest.mark.anyio

CLOCK = SystemClock()
W0 = WorkerId("w0")


class Index:
    """What a router would keep."""

    def __init__(self) -> None:
        self.hashes: dict[WorkerId, set[BlockHash]] = {}
        self.boots: dict[WorkerId, Boot] = {}
        self.num_snapshots = 0
        self.changed = asyncio.Event()

    def on_snapshot(self, worker_id: WorkerId, boot: Boot, hashes: list[BlockHash]) -> None:
        self.hashes[worker_id] = set(hashes)
        self.boots[worker_id] = boot
        self.num_snapshots += 1
        self.changed.set()

    def on_delta(
        self, worker_id: WorkerId, boot: Boot, stored: list[BlockHash], evicted: list[BlockHash]
    ) -> None:
        self.hashes[worker_id] |= set(stored)
        self.hashes[worker_id] -= set(evicted)
        self.changed.set()

    def on_gone(self, worker_id: WorkerId) -> None:
        del self.hashes[worker_id]
        self.changed.set()

    async def until(self, is_met: Callable[[], bool], within_s: float = 8.0) -> None:
        async with asyncio.timeout(within_s):
            while not is_met():
                self.changed.clear()
                await self.changed.wait()


def hashes(*numbers: int) -> set[BlockHash]:
    return {BlockHash(number.to_bytes(16, "big")) for number in numbers}


def register(client: EtcdClient, boot: str = "b0") -> RegistrationHandle:
    record = WorkerRecord(
        worker_id=W0,
        boot=Boot(boot),
        registration=0,
        role=Role.DECODE,
        address="127.0.0.1:1",
        metrics_address="127.0.0.1:2",
        model="m",
        model_fingerprint="f",
        layout="l",
        numerics="n",
        block_size=16,
        block_bytes=1024,
        num_blocks=8,
        max_model_len=128,
        fabric="inprocess",
        transport="inprocess",
        pid=1,
    )
    return Registry(client, "test", CLOCK, lease_s=2).register(record)


@pytest.fixture(scope="module", autouse=True)
async def one_loop() -> AsyncGenerator[None]:
    """Run all tests on one loop: gRPC still tells things to that of a client just closed."""
    loop = asyncio.get_running_loop()
    yield
    assert asyncio.get_running_loop() is loop


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A server for all tests."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
async def client(shared: EtcdServer) -> AsyncGenerator[EtcdClient]:
    """A client, where no other test has left a key."""
    client = EtcdClient(ControlPlaneConfig(etcd=shared.endpoint), clock=CLOCK)
    await client.connect()
    await client.transaction({}, [], delete_ranges=[("\0", "\0")])
    yield client
    await client.close()


async def test_an_index_follows_and_a_late_reader_knows_as_much(client: EtcdClient) -> None:
    handle = register(client)
    writer = LedgerWriter(client, "test", handle, clock=CLOCK)
    early, late = Index(), Index()
    reader = LedgerReader(client, "test", early)
    writer.publish(hashes(1, 2), hits={"local_cache": 32})
    await early.until(lambda: early.hashes.get(W0) == hashes(1, 2))
    for number in range(3, 8):
        writer.publish(hashes(number))
        await early.until(lambda number=number: hashes(number) <= early.hashes[W0])
    writer.publish((), hashes(1), preemptions=3)
    await early.until(lambda: early.hashes[W0] == hashes(2, 3, 4, 5, 6, 7))
    assert early.num_snapshots == 1
    assert reader.counters == {W0: CacheCounters({"local_cache": 32}, preemptions=3)}
    late_reader = LedgerReader(client, "test", late)
    await late.until(lambda: late.hashes.get(W0) == early.hashes[W0])
    for closing in (writer, handle):
        await closing.close()
    await late.until(lambda: late.hashes == {})
    await reader.close()
    await late_reader.close()


async def test_a_burst_is_one_write(client: EtcdClient) -> None:
    handle = register(client)
    writer = LedgerWriter(client, "test", handle, clock=CLOCK)
    index = Index()
    reader = LedgerReader(client, "test", index)
    writer.publish(hashes(0))
    await index.until(lambda: W0 in index.hashes)
    revision = (await client.get_prefix("/none")).revision
    for number in range(1000):
        writer.publish(hashes(number))
    await index.until(lambda: len(index.hashes[W0]) == 1000)
    assert (await client.get_prefix("/none")).revision == revision + 1
    await writer.close()
    await reader.close()
    await handle.close()


async def test_a_large_delta_is_a_snapshot_in_parts(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_records, "PART_HASHES", 10_000)
    handle = register(client)
    writer = LedgerWriter(client, "test", handle, clock=CLOCK)
    index = Index()
    reader = LedgerReader(client, "test", index)
    for first in (0, 20_000):
        many = hashes(*range(first, first + 20_000))
        writer.publish(many)
        await index.until(lambda first=first: len(index.hashes.get(W0, ())) == first + 20_000)
    assert index.num_snapshots == 2
    parts = await client.get_prefix("/dovetail/test/ledger/w0/snap/")
    assert len(parts.items) == 4  # the earlier snapshot's are gone
    await writer.close()
    await reader.close()
    await handle.close()


async def test_a_lost_lease_brings_the_ledger_back(client: EtcdClient) -> None:
    handle = register(client)
    writer = LedgerWriter(client, "test", handle, clock=CLOCK)
    index = Index()
    reader = LedgerReader(client, "test", index)
    writer.publish(hashes(1, 2))
    writer.preempted(RequestId("r1"), "recompute")
    await index.until(lambda: index.hashes.get(W0) == hashes(1, 2))
    assert handle.entry is not None
    await client.revoke_lease(handle.entry.lease)
    await index.until(lambda: index.hashes == {})
    await index.until(lambda: index.hashes.get(W0) == hashes(1, 2))
    assert await preempted(client, 1) == {"r1": Preemption(W0, Boot("b0"), "recompute")}
    await writer.close()
    await reader.close()
    await handle.close()


async def test_a_restarted_worker_begins_anew(client: EtcdClient) -> None:
    first = register(client)
    first_writer = LedgerWriter(client, "test", first, clock=CLOCK)
    index = Index()
    reader = LedgerReader(client, "test", index)
    first_writer.publish(hashes(1, 2))
    await index.until(lambda: index.hashes.get(W0) == hashes(1, 2))
    second = register(client, boot="b1")
    second_writer = LedgerWriter(client, "test", second, clock=CLOCK)
    second_writer.publish(hashes(3))
    first_writer.publish(hashes(4))  # a twin that was frozen: it has lost its entry
    await index.until(lambda: index.hashes.get(W0) == hashes(3))
    assert index.boots[W0] == "b1"
    second_writer.publish(hashes(5))
    await index.until(lambda: index.hashes.get(W0) == hashes(3, 5))
    for closing in (first_writer, second_writer, reader, first, second):
        await closing.close()


async def test_a_compacted_history_is_known_again_with_the_next_snapshot(
    client: EtcdClient,
) -> None:
    handle = register(client)
    writer = LedgerWriter(client, "test", handle, clock=CLOCK)
    early, late = Index(), Index()
    reader = LedgerReader(client, "test", early)
    for number in range(4):
        writer.publish(hashes(number))
        await early.until(lambda number=number: len(early.hashes.get(W0, ())) == number + 1)
    revision = (await client.get_prefix("/none")).revision
    await client._connections.current.kv.compact(revision, physical=True)
    late_reader = LedgerReader(client, "test", late)
    await late.until(lambda: late.hashes.get(W0) == hashes(0, 3))  # the snapshot, the last delta
    writer._state.lost()
    writer.publish(hashes(9))
    await late.until(lambda: late.hashes.get(W0) == hashes(0, 1, 2, 3, 9))
    for closing in (writer, reader, late_reader, handle):
        await closing.close()


async def test_a_gap_is_listed_again_and_strangers_are_skipped(client: EtcdClient) -> None:
    handle = register(client)
    writer = LedgerWriter(client, "test", handle, clock=CLOCK)
    index = Index()
    reader = LedgerReader(client, "test", index)
    writer.publish(hashes(1))
    await index.until(lambda: index.hashes.get(W0) == hashes(1))
    lost = Delta(Boot("b0"), 99, b"", b"", CacheCounters())
    delta_key, else_key = (f"/dovetail/test/ledger/w0/{name}" for name in ("delta", "else"))
    reader.on_changes([KeyValue(delta_key, msgspec.msgpack.encode(lost), 10**6)])
    await index.until(lambda: index.num_snapshots == 2)
    assert index.hashes[W0] == hashes(1)
    half = msgspec.msgpack.encode(Delta(Boot("b0"), 100, b"half a hash", b"", CacheCounters()))
    for key, value in ((delta_key, b"not a delta"), (delta_key, half), (else_key, b"")):
        await client.transaction({}, [Put(key, value)])
    writer.publish(hashes(2))
    await index.until(lambda: index.hashes[W0] == hashes(1, 2))
    for closing in (writer, reader, handle):
        await closing.close()


async def test_preemptions_come_and_go_and_are_told_early_and_late(client: EtcdClient) -> None:
    handle = register(client)
    writer = LedgerWriter(client, "test", handle, clock=CLOCK)
    early: asyncio.Queue[tuple[WorkerId, Boot, int]] = asyncio.Queue()
    late: asyncio.Queue[tuple[WorkerId, Boot, int]] = asyncio.Queue()
    watch = watch_preemptions(client, "test", lambda *told: early.put_nowait(told))
    for number in range(250):  # more than etcd takes in one transaction
        writer.preempted(RequestId(f"r{number}"), "recompute")
    await preempted(client, 250)
    late_watch = watch_preemptions(client, "test", lambda *told: late.put_nowait(told))
    assert await late.get() == (W0, Boot("b0"), 250)
    for number in range(249):
        writer.resumed(RequestId(f"r{number}"))
    writer.resumed(RequestId("unknown"))
    assert await preempted(client, 1) == {"r249": Preemption(W0, Boot("b0"), "recompute")}
    await writer.close()
    await handle.close()
    await preempted(client, 0)
    for told in (early, late):
        async with asyncio.timeout(8):
            while await told.get() != (W0, Boot("b0"), 0):
                pass
    await watch.close()
    await late_watch.close()


async def preempted(client: EtcdClient, number: int) -> dict[str, Preemption]:
    """Wait until there are so many records, and return them by request."""
    prefix = "/dovetail/test/preempted/"
    deadline = CLOCK.now() + 8
    while len((listing := await client.get_prefix(prefix)).items) != number:
        assert CLOCK.now() < deadline, f"{len(listing.items)} records"
        await asyncio.sleep(0.02)
    return {
        item.key.removeprefix(prefix): msgspec.json.decode(item.value, type=Preemption)
        for item in listing.items
    }
