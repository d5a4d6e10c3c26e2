"""The router's index over a real etcd equals what the workers' caches hold, set by set, whatever
happens to both while it changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator

import pytest

from control_plane.etcd.client import EtcdClient
from control_plane.etcd.values import Listing
from control_plane.ledger import state as ledger_state
from control_plane.ledger.reader import LedgerReader
from control_plane.ledger.writer import MAX_HZ, LedgerWriter
from control_plane.registry import Registry
from core.block_hash import BlockHash
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.ids import WorkerId
from tests.etcd_server import EtcdServer
from tests.ledger_index import FollowedIndex, block_hash
from tests.worker_records import worker_record

pytestmark = pytest.mark.anyio

CLOCK = SystemClock()
PART_BYTES = 1 << 20


@pytest.fixture(scope="module", autouse=True)
async def one_loop() -> AsyncGenerator[None]:
    """Run all tests on one loop: gRPC still tells things to that of a client just closed."""
    loop = asyncio.get_running_loop()
    yield
    assert asyncio.get_running_loop() is loop


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
async def client(etcd: EtcdServer) -> AsyncGenerator[EtcdClient]:
    """A client, where no other test has left a key."""
    client = EtcdClient(ControlPlaneConfig(etcd=etcd.endpoint), clock=CLOCK)
    await client.connect()
    await client.transaction({}, [], delete_ranges=[("\0", "\0")])
    yield client
    await client.close()


class Worker:
    """One life of a worker, and what its caches hold in truth."""

    def __init__(
        self, client: EtcdClient, worker_id: str, boot: str, ledger_hz: float = MAX_HZ
    ) -> None:
        self.worker_id = WorkerId(worker_id)
        self.truth: set[BlockHash] = set()
        # Longer than a loaded machine may keep this loop, which many thousand hashes keep busy
        registry = Registry(client, "test", CLOCK, lease_s=60)
        self._handle = registry.register(worker_record(worker_id=worker_id, boot=boot))
        self._writer = LedgerWriter(client, "test", self._handle, clock=CLOCK, ledger_hz=ledger_hz)

    def change(self, stored: set[BlockHash], evicted: set[BlockHash]) -> None:
        self.truth = (self.truth - evicted) | stored
        self._writer.publish(stored, evicted)

    async def close(self) -> None:
        await self._writer.close()
        await self._handle.close()


async def until_equal(
    index: FollowedIndex, workers: list[Worker], universe: list[BlockHash]
) -> None:
    truth = {worker.worker_id: worker.truth for worker in workers if worker.truth}
    sizes = {worker_id: len(held) for worker_id, held in truth.items()}

    def is_equal() -> bool:
        counted = {worker_id: index.index.num_blocks(worker_id) for worker_id in sizes}
        return counted == sizes and index.holders(universe) == truth

    await index.until(is_equal)


async def snapshot_parts(client: EtcdClient, worker: Worker) -> list[int]:
    prefix = f"/dovetail/test/ledger/{worker.worker_id}/snap/"
    listing: Listing = await client.get_prefix(prefix)
    return [len(item.value) for item in listing.items]


async def test_a_hundred_thousand_blocks_come_in_parts(client: EtcdClient) -> None:
    universe = [block_hash(number) for number in range(120_000)]
    worker, early, late = Worker(client, "w0", "b0"), FollowedIndex(), FollowedIndex()
    reader = LedgerReader(client, "test", early)
    worker.change(set(universe[:100_000]), set())
    await until_equal(early, [worker], universe)
    parts = await snapshot_parts(client, worker)
    assert len(parts) == 2
    assert max(parts) < PART_BYTES
    # More than fits into a delta: a snapshot in its place
    worker.change(set(universe[100_000:]), set(universe[:20_000]))
    await until_equal(early, [worker], universe)
    worker.change(set(universe[:10]), set(universe[-10:]))  # a delta on top
    late_reader = LedgerReader(client, "test", late)
    for index in (early, late):
        await until_equal(index, [worker], universe)
    assert len(await snapshot_parts(client, worker)) == 2
    for closing in (reader, late_reader, worker):
        await closing.close()


class Churn:
    """Workers that change, and routers that follow them from different moments on."""

    def __init__(self, client: EtcdClient) -> None:
        self.client = client
        self.rng = random.Random(20)
        self.universe = [block_hash(number) for number in range(400)]
        self.workers = [Worker(client, f"w{number}", "b0") for number in range(4)]
        self.indexes: list[FollowedIndex] = []
        self.readers: list[LedgerReader] = []
        self.add_router()

    def add_router(self) -> None:
        self.indexes.append(FollowedIndex())
        self.readers.append(LedgerReader(self.client, "test", self.indexes[-1]))

    def change_all(self) -> None:
        for worker in self.workers:
            evicted = set(self.rng.sample(sorted(worker.truth), len(worker.truth) // 4))
            stored = set(self.rng.sample(self.universe, self.rng.randrange(40))) - evicted
            worker.change(stored, evicted)

    async def happen(self, round_number: int) -> None:
        if round_number % 5 == 0:
            self.rng.choice(self.readers)._watch.list_again()
        if round_number == 8:
            await self.workers.pop(0).close()
            self.workers.append(Worker(self.client, "w0", "b1"))  # starts anew under its id
        if round_number == 12:
            self.add_router()
        if round_number == 16:
            await self.workers.pop(0).close()  # w1, for good

    async def close(self) -> None:
        for closing in (*self.readers, *self.workers):
            await closing.close()


@pytest.mark.parametrize("compacts", [False, True])
async def test_several_writers_churn_and_nobody_is_believed_to_hold_what_he_does_not(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch, compacts: bool
) -> None:
    """Deltas are overwritten before they are read, readers list again, history is compacted at any
    moment, one worker starts anew, another leaves, a router comes late."""
    monkeypatch.setattr(ledger_state, "DELTA_HASHES", 60)
    if compacts:  # what is compacted comes back with the next snapshot: one interval
        monkeypatch.setattr(ledger_state, "SNAPSHOT_S", 1.0)
    churn = Churn(client)
    for round_number in range(24):
        churn.change_all()
        await asyncio.sleep(0.05)
        await churn.happen(round_number)
        if compacts and round_number % 5 in (0, 2):  # also while a reader lists again
            await compact(client)
    for index in churn.indexes:
        await until_equal(index, churn.workers, churn.universe)
    await churn.close()


async def compact(client: EtcdClient) -> None:
    """Forget all history up to now, as an operator's etcd does now and then."""
    revision = (await client.get_prefix("/none")).revision
    await client._connections.current.kv.compact(revision, physical=True)


async def test_what_came_before_a_routine_snapshot_is_told_after_it(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A routine snapshot is as of the last delta; what changed since must not wait for more."""
    monkeypatch.setattr(ledger_state, "SNAPSHOT_S", 0.0)
    universe = [block_hash(number) for number in range(3)]
    worker, index = Worker(client, "w0", "b0", ledger_hz=4.0), FollowedIndex()
    reader = LedgerReader(client, "test", index)
    for stored in universe:  # a snapshot; a delta; in a quarter of a second the routine snapshot
        worker.change({stored}, set())
        await until_equal(index, [worker], universe)
    for closing in (reader, worker):
        await closing.close()


async def test_a_killed_worker_s_next_life_leaves_no_phantom(client: EtcdClient) -> None:
    """It comes back before its lease ends, and its first life is not heard of again."""
    universe = [block_hash(number) for number in range(40)]
    first, index = Worker(client, "w0", "b0"), FollowedIndex()
    reader = LedgerReader(client, "test", index)
    first.change(set(universe[:20]), set())
    await until_equal(index, [first], universe)
    second = Worker(client, "w0", "b1")
    second.change(set(universe[30:]), set())
    await until_equal(index, [second], universe)
    first.change(set(universe[20:25]), set())  # frozen, and thawed too late
    second.change({universe[29]}, {universe[39]})
    await until_equal(index, [second], universe)
    for closing in (first, second, reader):
        await closing.close()
