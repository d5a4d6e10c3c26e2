"""Client, leases, watches and registry against a real etcd that restarts, freezes and forgets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from control_plane.etcd import client as etcd_client
from control_plane.etcd import prefix_watch
from control_plane.etcd.client import EtcdClient
from control_plane.etcd.lease import Lease
from control_plane.etcd.prefix_watch import PrefixWatch
from control_plane.etcd.values import Deleted, KeyValue, Listing, Look, Newest, Put
from control_plane.ledger.reader import LedgerReader
from control_plane.ledger.records import CacheCounters, Head
from control_plane.ledger.writer import LedgerWriter
from control_plane.registration import ensure_world
from control_plane.registry import Registry, WorkerChange, WorkerSeen, WorkerSuspect
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.errors import ControlPlaneError
from core.ids import Boot, WorkerId
from core.worker_record import Role, WorkerRecord
from tests.etcd_mirror import Mirror
from tests.etcd_server import EtcdServer
from tests.worker_records import worker_record

pytestmark = pytest.mark.anyio

CLOCK = SystemClock()
WORLD = "/dovetail/test/world"


@pytest.fixture(scope="module", autouse=True)
async def one_loop() -> AsyncGenerator[None]:
    """Run all tests on one loop: gRPC still tells things to that of a client just closed."""
    loop = asyncio.get_running_loop()
    yield
    assert asyncio.get_running_loop() is loop


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A server for all tests that leave it alone."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="module")
def suffering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def etcd(suffering: EtcdServer) -> Iterator[EtcdServer]:
    """A server that each test may stop, empty, freeze and thaw."""
    suffering.revive()
    yield suffering
    suffering.revive()


@asynccontextmanager
async def client_of(server: EtcdServer, timeout_s: float = 2.0) -> AsyncGenerator[EtcdClient]:
    config = ControlPlaneConfig(etcd=server.endpoint, request_timeout_s=timeout_s)
    client = EtcdClient(config, clock=CLOCK)
    await client.connect()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
async def client(shared: EtcdServer) -> AsyncGenerator[EtcdClient]:
    """A client of the shared server, where no other test has left a key."""
    async with client_of(shared) as client:
        await client.transaction({}, [], delete_ranges=[("\0", "\0")])
        yield client


@pytest.fixture
async def its_client(etcd: EtcdServer) -> AsyncGenerator[EtcdClient]:
    """A client of the server that suffers, with short deadlines."""
    async with client_of(etcd) as cleaner:
        await cleaner.transaction({}, [], delete_ranges=[("\0", "\0")])
    async with client_of(etcd, timeout_s=0.5) as client:
        yield client


@pytest.fixture
def quick_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_watch, "POLL_S", 0.3)
    monkeypatch.setattr(prefix_watch, "_GRACE_S", 0.1)


class Changes:
    """What a router hears."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[WorkerChange] = asyncio.Queue()

    async def next(self, within_s: float = 8.0) -> WorkerChange:
        async with asyncio.timeout(within_s):
            return await self.queue.get()

    async def seen(self) -> WorkerRecord:
        change = await self.next()
        assert isinstance(change, WorkerSeen), change
        return change.record


async def test_deadlines_hold_when_etcd_is_frozen_and_one_line_tells_it(
    etcd: EtcdServer,
    its_client: EtcdClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(etcd_client, "_LISTING_DEADLINES", 1)
    caplog.set_level(logging.INFO)
    await put(its_client, "/a", b"1")
    etcd.freeze()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: its_client.get("/a"),
        lambda: its_client.get_prefix("/a"),
        lambda: its_client.transaction({}, [Put("/a", b"3")]),
        lambda: its_client.grant_lease(5),
        lambda: its_client.keep_alive(1),
        lambda: its_client.newest("/a"),
    ]
    results = await asyncio.gather(*[call() for call in calls], return_exceptions=True)
    assert [type(result) for result in results] == [ControlPlaneError] * len(calls)
    etcd.thaw()
    await its_client.get("/a")
    outage = [r.message for r in caplog.records if r.name == "control_plane.etcd.outage"]
    assert len(outage) == 2
    assert "serving goes on without it" in outage[0]
    assert "etcd answers again" in outage[1]


async def test_transactions_compare_and_set(client: EtcdClient) -> None:
    assert await client.transaction({"/a": None}, [Put("/a", b"1"), Put("/b/1", b"")])
    assert await client.transaction({"/a": None}, [Put("/a", b"2")]) is None
    assert await client.transaction({"/a": b"x"}, [Put("/a", b"2")]) is None
    revision = await client.transaction(
        {"/a": b"1"}, [Put("/a", b"2")], delete_ranges=[("/b/", "/b0")]
    )
    listing = await client.get_prefix("/")
    assert (listing.revision, [item.value for item in listing.items]) == (revision, [b"2"])


async def test_a_lease_is_fenced_locally_before_etcd_gives_it_away(
    etcd: EtcdServer, its_client: EtcdClient
) -> None:
    lease = await Lease.grant(its_client, 2.0, clock=CLOCK)
    assert lease.is_valid(CLOCK.now())
    etcd.freeze()
    frozen_at = CLOCK.now()
    assert not lease.is_valid(frozen_at + lease.ttl_s)
    etcd.thaw()
    await lease.revoke()


async def test_a_watch_goes_on_over_a_restart_with_data(
    etcd: EtcdServer, its_client: EtcdClient
) -> None:
    mirror = Mirror()
    await put(its_client, "/p/1", b"1")
    watch = PrefixWatch(its_client, "/p/", mirror, world_key=WORLD)
    await mirror.until(lambda: mirror.content == {"/p/1": b"1"})
    await put(its_client, "/p/2", b"2")
    await mirror.until(lambda: len(mirror.content) == 2)
    await asyncio.to_thread(etcd.restart)
    await _put_when_back(its_client, "/p/3")
    await delete(its_client, "/p/1")
    await mirror.until(lambda: set(mirror.content) == {"/p/2", "/p/3"})
    await watch.close()


async def test_a_watch_sees_an_etcd_that_came_back_empty(
    etcd: EtcdServer, its_client: EtcdClient
) -> None:
    mirror = Mirror()
    for index in range(20):
        await put(its_client, f"/p/{index}", b"")
    watch = PrefixWatch(its_client, "/p/", mirror, world_key=WORLD)
    await mirror.until(lambda: len(mirror.content) == 20)
    await asyncio.to_thread(etcd.restart, empty=True)
    await _put_when_back(its_client, "/p/new")
    await mirror.until(lambda: set(mirror.content) == {"/p/new"})
    await watch.close()


async def test_another_world_is_listed_again(client: EtcdClient, quick_poll: None) -> None:
    await put(client, WORLD, b"one")
    mirror = Mirror()
    watch = PrefixWatch(client, "/p/", mirror, world_key=WORLD)
    await mirror.until(lambda: mirror.num_listings == 1)
    await put(client, WORLD, b"another")
    await mirror.until(lambda: mirror.num_listings == 2)
    await watch.close()


async def test_a_poll_looks_at_keys_only_where_anything_was_written(
    client: EtcdClient, quick_poll: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    thrice = asyncio.Event()
    look, newest = client.look, client.newest

    async def counted_look(key: str) -> Look:
        calls.append("look")
        if calls.count("look") == 3:
            thrice.set()
        return await look(key)

    async def counted_newest(prefix: str) -> Newest:
        calls.append("newest")
        return await newest(prefix)

    await put(client, WORLD, b"one")
    mirror = Mirror()
    watch = PrefixWatch(client, "/p/", mirror, world_key=WORLD)
    await mirror.until(lambda: mirror.num_listings == 1)
    monkeypatch.setattr(client, "look", counted_look)
    monkeypatch.setattr(client, "newest", counted_newest)
    async with asyncio.timeout(10.0):
        await thrice.wait()
    await watch.close()
    assert calls.count("newest") <= 1
    assert mirror.num_listings == 1


async def test_a_watch_that_fell_silent_is_found(
    client: EtcdClient, quick_poll: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(prefix: str, start_revision: int) -> AsyncGenerator[list[KeyValue | Deleted]]:
        await asyncio.Event().wait()
        yield []

    monkeypatch.setattr(client, "watch", silent)
    mirror = Mirror()
    await put(client, "/p/1", b"1")
    watch = PrefixWatch(client, "/p/", mirror, world_key=WORLD)
    await mirror.until(lambda: mirror.content == {"/p/1": b"1"})
    await put(client, "/p/1", b"2")
    await mirror.until(lambda: mirror.content == {"/p/1": b"2"})
    await delete(client, "/p/1")
    await mirror.until(lambda: mirror.content == {})
    assert mirror.num_listings == 3
    await watch.close()


class Forgetful(Mirror):
    """Wants to hear everything from the first revision again."""

    def __init__(self) -> None:
        super().__init__()
        self.replay_from: list[int] = []

    def on_listing(self, listing: Listing, *, replay_from: int) -> int:
        super().on_listing(listing, replay_from=replay_from)
        self.replay_from.append(replay_from)
        return replay_from


async def test_a_compacted_history_is_not_waited_for(client: EtcdClient) -> None:
    for index in range(10):
        await put(client, "/p/1", str(index).encode())
    revision = (await client.get_prefix("/p/")).revision
    await client._connections.current.kv.compact(revision - 1, physical=True)
    mirror = Forgetful()
    watch = PrefixWatch(client, "/p/", mirror, world_key=WORLD)
    await mirror.until(lambda: mirror.replay_from[-1:] == [revision])
    await put(client, "/p/2", b"new")
    await mirror.until(lambda: mirror.content == {"/p/1": b"9", "/p/2": b"new"})
    await watch.close()


async def test_a_worker_registers_changes_and_leaves(client: EtcdClient) -> None:
    registry = Registry(client, "test", CLOCK, lease_s=1)
    changes = Changes()
    watch = registry.watch_workers(changes.queue.put_nowait)
    handle = registry.register(worker_record())
    seen = await changes.seen()
    assert (seen.worker_id, seen.registration) == ("w0", 1)
    await handle.wait_registered()
    assert handle.is_valid(CLOCK.now())
    assert not handle.is_valid(CLOCK.now() + 10)
    handle.update(role=Role.PREFILL)
    seen = await changes.seen()
    assert (seen.role, seen.registration) == (Role.PREFILL, 2)
    assert await registered(client) == [seen]
    await handle.close()
    assert await changes.next() == WorkerSuspect(WorkerId("w0"), Boot("b0"))
    await watch.close()


async def test_who_changes_again_under_a_registration_waits_for_the_last_change(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(client, "test", CLOCK, lease_s=1)
    handle = registry.register(worker_record())
    await handle.wait_registered()
    transaction = client.transaction

    async def overtaken(expect: Any, puts: Any) -> int | None:
        revision = await transaction(expect, puts)
        if "/dovetail/test/workers/w0" in expect and handle.record.is_draining:
            handle.update(role=Role.PREFILL, is_draining=False)
        return revision

    monkeypatch.setattr(client, "transaction", overtaken)
    handle.update(is_draining=True)
    await handle.wait_registered()
    (entry,) = await registered(client)
    assert (entry.role, entry.is_draining) == (Role.PREFILL, False)
    await handle.close()


async def test_a_restarted_worker_takes_its_entry_over(client: EtcdClient) -> None:
    registry = Registry(client, "test", CLOCK, lease_s=1)
    first = registry.register(worker_record(boot="b0"))
    await first.wait_registered()
    second = registry.register(worker_record(boot="b1"))
    await second.wait_registered()
    await until(lambda: not first.is_valid(CLOCK.now()))
    (entry,) = await registered(client)
    assert (entry.boot, entry.registration) == ("b1", 2)
    await second.close()  # and the first, whose process lives, comes back
    await first.wait_registered()
    (entry,) = await registered(client)
    assert entry.boot == "b0"
    await first.close()


async def test_registered_again_after_a_lease_revoked_by_hand(client: EtcdClient) -> None:
    registry = Registry(client, "test", CLOCK, lease_s=1)
    changes = Changes()
    watch = registry.watch_workers(changes.queue.put_nowait)
    handle = registry.register(worker_record())
    await changes.seen()
    await handle.wait_registered()
    assert handle.entry is not None
    await client.revoke_lease(handle.entry.lease)
    assert isinstance(await changes.next(), WorkerSuspect)
    assert (await changes.seen()).registration == 2
    await handle.close()
    await watch.close()


async def test_registered_again_after_a_freeze_longer_than_the_lease(
    etcd: EtcdServer, its_client: EtcdClient
) -> None:
    registry = Registry(its_client, "test", CLOCK, lease_s=1)
    changes = Changes()
    watch = registry.watch_workers(changes.queue.put_nowait)
    handle = registry.register(worker_record())
    await changes.seen()
    await handle.wait_registered()
    etcd.freeze()
    await asyncio.sleep(1.5)  # etcd's clock goes on while it is frozen; there is no event to await
    assert not handle.is_valid(CLOCK.now())
    assert changes.queue.empty()
    etcd.thaw()
    change = await changes.next()
    while not (isinstance(change, WorkerSeen) and change.record.registration >= 2):
        change = await changes.next()
    await handle.wait_registered()
    assert handle.is_valid(CLOCK.now())
    await handle.close()
    await watch.close()


async def test_registered_again_in_an_etcd_that_came_back_empty(
    etcd: EtcdServer, its_client: EtcdClient
) -> None:
    registry = Registry(its_client, "test", CLOCK, lease_s=1)
    handle = registry.register(worker_record())
    await handle.wait_registered()
    world = await its_client.get(WORLD)
    await asyncio.to_thread(etcd.restart, empty=True)
    await until(lambda: handle.record.registration == 2)
    assert [entry.registration for entry in await registered(its_client)] == [2]
    assert await its_client.get(WORLD) != world
    await handle.close()


async def test_a_worker_that_starts_before_etcd_registers_later(etcd: EtcdServer) -> None:
    etcd.kill()
    async with client_of(etcd) as client:
        handle = Registry(client, "test", CLOCK, lease_s=1).register(worker_record())
        await asyncio.to_thread(etcd.restart)
        async with asyncio.timeout(8):
            await handle.wait_registered()
        await handle.close()


async def test_a_world_is_made_once(client: EtcdClient) -> None:
    registry = Registry(client, "test", CLOCK, lease_s=1)
    handle = registry.register(worker_record())
    await handle.wait_registered()
    world = await client.get(WORLD)
    assert world is not None
    await ensure_world(client, registry._keys)
    assert await client.get(WORLD) == world
    await handle.close()


def fail(*_: object) -> None:
    msg = "nobody expected it"
    raise RuntimeError(msg)


@pytest.mark.parametrize("part", ["registration", "workers", "ledger", "ledger writer"])
async def test_a_part_that_fails_is_told_to_its_owner(client: EtcdClient, part: str) -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    registry = Registry(client, "test", CLOCK, lease_s=2, on_failure=failed.set_result)
    handle = registry.register(worker_record())
    if part == "registration":
        handle.on_registered(fail)
        closing = handle
    elif part == "workers":
        closing = registry.watch_workers(fail)
    elif part == "ledger":
        await put(client, "/dovetail/test/ledger/w9/delta", b"")
        untyped: Any = None  # a listener without methods
        closing = LedgerReader(client, "test", untyped, on_failure=failed.set_result)
        head = Head(Boot("b"), "g", 1, 0, CacheCounters())
        await put(client, "/dovetail/test/ledger/w9/head", msgspec.msgpack.encode(head))
    else:
        closing = LedgerWriter(client, "test", handle, clock=CLOCK, on_failure=failed.set_result)
        untyped = closing
        untyped._keys = None
    async with asyncio.timeout(8):
        error = await failed
    assert isinstance(error, (RuntimeError, AttributeError))
    await closing.close()  # it ended, and does not fail once more
    await handle.close()


async def test_a_strangers_key_that_is_no_text_ends_nothing(client: EtcdClient) -> None:
    mirror = Mirror()
    watch = PrefixWatch(client, "/p/", mirror, world_key=WORLD)
    kv = client._connections.current.kv
    await kv.put(b"/p/\xff", b"1")
    await mirror.until(lambda: mirror.content == {"/p/\\xff": b"1"})
    await kv.delete(b"/p/\xff")
    await mirror.until(lambda: mirror.content == {})
    await watch.close()


async def put(client: EtcdClient, key: str, value: bytes) -> None:
    """Write as a stranger would, without conditions."""
    assert await client.transaction({}, [Put(key, value)]) is not None


async def delete(client: EtcdClient, key: str) -> None:
    assert await client.transaction({}, [], deletes=[key]) is not None


async def registered(client: EtcdClient) -> list[WorkerRecord]:
    """Return who is registered now, in the order of their ids."""
    listing = await client.get_prefix("/dovetail/test/workers/")
    return [msgspec.json.decode(item.value, type=WorkerRecord) for item in listing.items]


async def until(is_met: Callable[[], bool], within_s: float = 8.0) -> None:
    """Wait for what has no event to await."""
    deadline = CLOCK.now() + within_s
    while not is_met():
        assert CLOCK.now() < deadline, "it never came"
        await asyncio.sleep(0.01)


async def _put_when_back(client: EtcdClient, key: str) -> None:
    async with asyncio.timeout(5):
        while True:
            try:
                return await put(client, key, b"")
            except ControlPlaneError:
                await asyncio.sleep(0.05)
