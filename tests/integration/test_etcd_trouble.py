"""etcd far away, without space, and of several members one of which dies or hangs: all goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest

from control_plane.etcd import prefix_watch
from control_plane.etcd.client import EtcdClient
from control_plane.etcd.values import Put
from control_plane.ledger.reader import LedgerReader
from control_plane.ledger.writer import LedgerWriter
from control_plane.registration import RegistrationHandle
from control_plane.registry import Registry, WorkerChange, WorkerSeen
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.errors import ControlPlaneError
from core.ids import WorkerId
from tests.etcd_server import EtcdServer
from tests.ledger_index import WITHIN_S, FollowedIndex, block_hash
from tests.slow_proxy import slow_proxy
from tests.worker_records import worker_record

pytestmark = pytest.mark.anyio

CLOCK = SystemClock()
W0 = WorkerId("w0")


@pytest.fixture(scope="module", autouse=True)
async def one_loop() -> AsyncGenerator[None]:
    """Run all tests on one loop: gRPC still tells things to that of a client just closed."""
    loop = asyncio.get_running_loop()
    yield
    assert asyncio.get_running_loop() is loop


class Router:
    """A registry's watch and a ledger's reader over a client of their own."""

    def __init__(self, client: EtcdClient) -> None:
        self.workers: list[WorkerChange] = []
        self.ledger = FollowedIndex()
        self._watch = Registry(client, "test", CLOCK).watch_workers(self.workers.append)
        self._reader = LedgerReader(client, "test", self.ledger)

    async def close(self) -> None:
        await self._watch.close()
        await self._reader.close()


class Worker:
    """A registration and a ledger's writer over a client of their own."""

    def __init__(self, client: EtcdClient, lease_s: float) -> None:
        registry = Registry(client, "test", CLOCK, lease_s=lease_s)
        self.handle: RegistrationHandle = registry.register(worker_record())
        self.writer = LedgerWriter(client, "test", self.handle, clock=CLOCK)

    def publish(self, *numbers: int) -> None:
        self.writer.publish([block_hash(number) for number in numbers])

    async def close(self) -> None:
        await self.writer.close()
        await self.handle.close()


async def client_of(stack: AsyncExitStack, etcd: str, timeout_s: float = 2.0) -> EtcdClient:
    config = ControlPlaneConfig(etcd=etcd, request_timeout_s=timeout_s)
    client = EtcdClient(config, clock=CLOCK)
    await client.connect()
    stack.push_async_callback(client.close)
    return client


async def both(
    stack: AsyncExitStack, etcd: str, *, lease_s: float, timeout_s: float = 2.0
) -> tuple[Worker, Router]:
    worker = Worker(await client_of(stack, etcd, timeout_s), lease_s)
    stack.push_async_callback(worker.close)
    router = Router(await client_of(stack, etcd, timeout_s))
    stack.push_async_callback(router.close)
    return worker, router


async def until_indexed(router: Router, *numbers: int) -> None:
    expected = {W0: {block_hash(number) for number in numbers}}
    universe = [block_hash(number) for number in range(100)]
    await router.ledger.until(lambda: router.ledger.holders(universe) == expected)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A member alone, with as little space as etcd can do with."""
    directory = tmp_path_factory.mktemp("etcd")
    with EtcdServer(directory, flags={"quota-backend-bytes": str(2 << 20)}) as server:
        yield server


async def test_half_a_second_each_way_loses_no_lease(etcd: EtcdServer) -> None:
    async with slow_proxy(etcd.endpoint, 0.5) as proxy, AsyncExitStack() as stack:
        worker, router = await both(stack, proxy.endpoint, lease_s=2)
        worker.publish(1, 2)
        await until_indexed(router, 1, 2)
        worker.publish(3)
        await until_indexed(router, 1, 2, 3)
        # Four answers since the lease was granted took longer than it lives unless kept alive
        assert worker.handle.record.registration == 1
        assert [type(change) for change in router.workers] == [WorkerSeen]


async def test_an_etcd_without_space_is_one_line_and_all_is_told_when_it_has_some(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "control_plane.etcd")
    async with AsyncExitStack() as stack:
        worker, router = await both(stack, etcd.endpoint, lease_s=1)
        worker.publish(1)
        await until_indexed(router, 1)
        stranger = await client_of(stack, etcd.endpoint)
        with pytest.raises(ControlPlaneError, match="database space exceeded"):
            await fill(stranger)
        caplog.clear()
        worker.publish(2)
        await until(lambda: "compact, defragment and disarm its alarm" in caplog.text)
        worker.publish(3)
        lease: Any = worker.handle._lease
        first = lease._valid_until
        await until(lambda: lease._valid_until > first + 1)  # kept alive: that takes no space
        await until_indexed(router, 1)
        await make_space(etcd, stranger)
        await until_indexed(router, 1, 2, 3)
        assert worker.handle.record.registration == 1
    lines = [r.getMessage() for r in caplog.records if r.name == "control_plane.etcd.outage"]
    assert len(lines) == 2, lines
    assert "etcd takes writes again after" in lines[1]


async def fill(client: EtcdClient) -> None:
    while True:
        await client.transaction({}, [Put("/a", b"x" * 300_000)])


async def until(is_met: Callable[[], bool]) -> None:
    """Wait for what has no event to await."""
    deadline = CLOCK.now() + WITHIN_S
    while not is_met():
        assert CLOCK.now() < deadline, "it never came"
        await asyncio.sleep(0.02)


async def make_space(etcd: EtcdServer, client: EtcdClient) -> None:
    """Do what etcd's manual wants done."""
    await asyncio.to_thread(etcd.ctl, "del", "/a")
    revision = (await client.get_prefix("/none")).revision
    for command in (("compaction", str(revision)), ("defrag",), ("alarm", "disarm")):
        await asyncio.to_thread(etcd.ctl, *command)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[EtcdServer]]:
    flags = {"heartbeat-interval": "50", "election-timeout": "500"}
    with ExitStack() as stack:
        servers = [EtcdServer(tmp_path, flags=flags, name=name) for name in ("a", "b", "c")]
        for server in servers:
            server.members = [one.peer for one in servers]
            server.spawn()
            stack.push(server)
        for server in servers:
            server.wait_ready()
        yield servers


async def test_of_several_members_one_dies_and_one_hangs(
    members: list[EtcdServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_watch, "POLL_S", 1.0)  # what finds a watch of the one that hangs
    by_endpoint = {server.endpoint: server for server in members}
    endpoints = ",".join(by_endpoint)
    async with AsyncExitStack() as stack:
        worker, router = await both(stack, endpoints, lease_s=10, timeout_s=0.5)
        worker.publish(1)
        await until_indexed(router, 1)
        connections: Any = worker.writer._client._connections
        dead = by_endpoint[connections.current.endpoint]
        dead.kill()
        worker.publish(2)
        await until_indexed(router, 1, 2)
        dead.spawn()
        await asyncio.to_thread(dead.wait_ready)
        hanging = by_endpoint[connections.current.endpoint]
        assert hanging is not dead
        hanging.freeze()
        worker.publish(3)
        await until_indexed(router, 1, 2, 3)
        assert connections.current.endpoint != hanging.endpoint
        assert worker.handle.record.registration == 1
        assert [type(change) for change in router.workers] == [WorkerSeen]
        hanging.thaw()
