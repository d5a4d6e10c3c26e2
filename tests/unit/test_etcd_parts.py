"""Keys, leases and the workers' view, without an etcd."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any

import msgspec
import pytest

from control_plane.etcd.client import EtcdClient
from control_plane.etcd.connections import Connection
from control_plane.etcd.lease import Lease
from control_plane.etcd.values import Deleted, KeyValue, Listing
from control_plane.keys import ClusterKeys
from control_plane.registry import WorkerChange, WorkerSeen, WorkersListener, WorkerSuspect
from core.clock import ManualClock
from core.config import ControlPlaneConfig
from core.errors import ConfigError, ControlPlaneError
from core.ids import Boot, WorkerId
from core.worker_record import Role, WorkerRecord

RECORD = WorkerRecord(
    worker_id=WorkerId("w0"),
    boot=Boot("b0"),
    registration=1,
    role=Role.BOTH,
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


def entry(record: WorkerRecord) -> KeyValue:
    return KeyValue(f"/workers/{record.worker_id}", msgspec.json.encode(record), mod_revision=1)


class View:
    """A `WorkersListener` and what it told."""

    def __init__(self) -> None:
        self.told: list[WorkerChange] = []
        self.listener = WorkersListener(self.told.append, "/workers/")

    def list(self, *records: WorkerRecord) -> list[WorkerChange]:
        listing = Listing(7, tuple([entry(record) for record in records]))
        assert self.listener.on_listing(listing, replay_from=1) == 8
        return self.take()

    def change(self, *changes: KeyValue | Deleted) -> list[WorkerChange]:
        self.listener.on_changes([*changes])
        return self.take()

    def take(self) -> list[WorkerChange]:
        told = [*self.told]
        self.told.clear()
        return told


def test_a_listing_tells_what_is_new_and_suspects_what_it_lacks() -> None:
    view = View()
    other = msgspec.structs.replace(RECORD, worker_id=WorkerId("w1"))
    assert view.list(RECORD, other) == [WorkerSeen(RECORD), WorkerSeen(other)]
    assert view.list(RECORD, other) == []
    assert view.list(other) == [WorkerSuspect(WorkerId("w0"), Boot("b0"))]
    assert view.list(other) == []


def test_changes_are_told_and_a_deletion_is_suspicion() -> None:
    view = View()
    restarted = msgspec.structs.replace(RECORD, boot=Boot("b1"))
    assert view.change(entry(RECORD), entry(restarted)) == [
        WorkerSeen(RECORD),
        WorkerSeen(restarted),
    ]
    gone = Deleted("/workers/w0", mod_revision=2)
    assert view.change(gone, gone) == [WorkerSuspect(WorkerId("w0"), Boot("b1"))]
    assert view.change(entry(restarted)) == [WorkerSeen(restarted)]


def test_what_is_not_a_record_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    view = View()
    assert view.change(KeyValue("/workers/w9", b"{}", mod_revision=1)) == []
    assert "/workers/w9 is not a worker's record" in caplog.text


@pytest.mark.parametrize("cluster", ["", "a/b", "x" * 129, "é"])
def test_a_cluster_cannot_reach_into_another(cluster: str) -> None:
    with pytest.raises(ConfigError, match=r"control_plane\.cluster"):
        ClusterKeys(cluster)


def test_other_snapshots_are_all_but_one() -> None:
    keys = ClusterKeys("c")
    worker_id = WorkerId("w")
    ranges = keys.other_snapshots(worker_id, "b-2")

    def is_deleted(generation: str) -> bool:
        key = keys.part(worker_id, generation, 0)
        return any(first <= key < end for first, end in ranges)

    assert [is_deleted(name) for name in ("b-1", "b-2", "b-20", "b-3", "c-1", "a-9")] == [
        True,
        False,
        True,
        True,
        True,
        True,
    ]
    assert not any(first <= keys.head(worker_id) < end for first, end in ranges)
    assert not any(first <= keys.delta(worker_id) < end for first, end in ranges)


def test_an_endpoint_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"control_plane\.etcd"):
        EtcdClient(ControlPlaneConfig(), clock=ManualClock())


@pytest.mark.anyio
async def test_an_etcd_never_reached_is_waited_for_and_a_lost_one_is_done_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="control_plane.etcd.outage")
    client = EtcdClient(ControlPlaneConfig(etcd="h:1,i:2"), clock=ManualClock())
    await client.connect()

    async def answer(_: Connection) -> int:
        return 1

    async def hang(_: Connection) -> int:
        raise TimeoutError

    for call in (hang, hang, hang, answer, hang, answer, hang, hang, answer):
        try:
            await client._call("get", call)
        except ControlPlaneError:
            continue
    await client.close()
    outage = "etcd: get: no answer within the deadline; "
    assert [record.message for record in caplog.records] == [
        f"{outage}waiting for etcd at h:1, i:2 without TLS",
        "etcd answers after 0.0 s",
        f"{outage}serving goes on without it",
        "etcd answers again after 0.0 s",
    ]


class FakeLeases:
    """Answers keepalives when the test lets it, later than they were sent."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.rng = Random(1)
        self.answers: asyncio.Queue[float] = asyncio.Queue()
        self.asked = asyncio.Event()

    async def grant_lease(self, ttl_s: float) -> tuple[int, float]:
        self.clock.advance(1.0)  # the answer takes a second
        return 1, ttl_s

    async def keep_alive(self, lease: int) -> float:
        self.asked.set()
        return await self.answers.get()

    async def revoke_lease(self, lease: int) -> None:
        raise ControlPlaneError


@pytest.mark.anyio
async def test_whoever_owns_a_lease_hears_that_its_callback_failed() -> None:
    clock = ManualClock()
    etcd: Any = FakeLeases(clock)
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    lease = await Lease.grant(etcd, 0.3, clock=clock, on_failure=failed.set_result)

    def lost() -> None:
        msg = "nobody expected it"
        raise RuntimeError(msg)

    lease.on_lost(lost)
    etcd.answers.put_nowait(0.0)
    error = await failed
    assert (str(error), error.__notes__) == ("nobody expected it", ["in the task 'lease 1'"])
    await lease.revoke()


@pytest.mark.anyio
async def test_a_failure_without_owner_is_the_loops() -> None:
    loop = asyncio.get_running_loop()
    told: asyncio.Future[dict[str, Any]] = loop.create_future()
    handler = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: told.set_result(context))
    clock = ManualClock()
    etcd: Any = FakeLeases(clock)
    etcd.keep_alive = None  # whatever goes wrong
    lease = await Lease.grant(etcd, 0.3, clock=clock)
    context = await told
    loop.set_exception_handler(handler)
    assert isinstance(context["exception"], TypeError)
    await lease.revoke()


@pytest.mark.anyio
async def test_a_lease_is_valid_from_when_it_was_asked_for() -> None:
    clock = ManualClock(100.0)
    etcd: Any = FakeLeases(clock)
    lease = await Lease.grant(etcd, 0.3, clock=clock)
    lost = asyncio.Event()
    lease.on_lost(lost.set)
    assert clock.now() == 101.0
    assert not lease.is_valid(100.3)  # granted at 101, but asked for at 100
    assert lease.is_valid(100.2)
    await etcd.asked.wait()  # the first keepalive is sent at 101
    etcd.asked.clear()
    clock.advance(0.2)
    etcd.answers.put_nowait(0.3)
    await etcd.asked.wait()
    assert lease.is_valid(101.2)
    assert not lease.is_valid(101.3)
    etcd.answers.put_nowait(0.0)
    await lost.wait()
    assert lease.is_lost
    assert not lease.is_valid(101.2)
    await lease.revoke()  # without etcd it just goes on
