"""What the dispatcher does with workers that leave or change their role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from control_plane.registry import WorkerSeen
from core.errors import RequestError
from core.ids import RequestId, WorkerId
from core.messages import DrainWorker, MoveRequest, RequestMoved, WorkerLoad
from core.worker_record import Role
from tests.dispatch_cluster import Cluster, expected, read, running, settle
from tests.dispatch_workers import FakeWorker, MemoryNetwork

pytestmark = pytest.mark.anyio

DRAINING = WorkerLoad(is_draining=True)
R = RequestId("r")


@pytest.fixture
async def cluster() -> AsyncGenerator[Cluster]:
    async with running(MemoryNetwork()) as found:
        yield found


def state_of(cluster: Cluster, name: str) -> str:
    return next(one["state"] for one in cluster.status() if one["id"] == name)


async def drain(cluster: Cluster, worker: FakeWorker) -> None:
    worker.say(DRAINING)
    await cluster.until(lambda: state_of(cluster, worker.name) == "draining")


def finish(worker: FakeWorker) -> None:
    while worker.jobs:
        worker.step()


@pytest.mark.parametrize("has_kv", [True, False])
async def test_what_runs_where_a_worker_drains_goes_on_at_another(
    cluster: Cluster, has_kv: bool
) -> None:
    await cluster.add("d0", Role.DECODE)
    await cluster.add("d1", Role.DECODE)
    stream = cluster.start("r", n=2, max_tokens=6)
    await cluster.until_one_has("r")
    first = cluster.find("r")
    first.step()
    await cluster.until(lambda: stream.num_updates == 2)
    await drain(cluster, first)
    await cluster.until(lambda: bool(first.told))
    first.say(DRAINING)
    await settle()
    assert first.told == [MoveRequest(R, 1)], "it is asked once"
    first.step()  # what it had computed before it was told
    del first.jobs[R]
    first.say(RequestMoved(R, 1, has_kv))
    await cluster.until_one_has("r", besides=first)
    (start,) = (second := cluster.find("r", besides=first)).started
    assert start.dispatch == 2
    assert start.request.outputs == (tuple(expected(2)), tuple(expected(2, 1)))
    assert [one.worker_id for one in start.candidates] == ([first.name] if has_kv else [])
    assert start.allow_local
    finish(second)
    assert await read(stream, 2) == [expected(6), expected(6, 1)]


async def test_without_another_worker_it_finishes_where_it_is(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    await cluster.add("p0", Role.PREFILL)
    stream = cluster.start("r", max_tokens=4)
    await cluster.until_one_has("r")
    await drain(cluster, worker)
    assert worker.told == []
    assert not cluster.dispatcher.is_ready()
    another = await cluster.add("d1", Role.DECODE)
    worker.say(DRAINING)  # its next load: one came up meanwhile
    await cluster.until(lambda: worker.told == [MoveRequest(R, 1)])
    finish(worker)  # it had ended before it was told
    assert await read(stream) == [expected(4)]
    assert another.started == []


async def test_a_worker_that_drains_gets_nothing_new_and_its_record_says_so(
    cluster: Cluster,
) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    record = msgspec.structs.replace(worker.record(), is_draining=True)
    cluster.dispatcher.on_worker_change(WorkerSeen(record))
    assert state_of(cluster, "d0") == "draining"
    stream = cluster.start("r", max_tokens=2)
    await asyncio.sleep(0.02)
    assert worker.started == []
    other_role = msgspec.structs.replace(worker.record(), role=Role.BOTH)
    cluster.dispatcher.on_worker_change(WorkerSeen(other_role))
    await cluster.until_one_has("r")
    finish(worker)
    assert await read(stream) == [expected(2)]


async def test_who_waits_goes_on_where_a_worker_takes_work_again(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    await drain(cluster, worker)
    stream = cluster.start("r", max_tokens=2)
    worker.say(WorkerLoad())
    await cluster.until_one_has("r")
    finish(worker)
    assert await read(stream) == [expected(2)]


async def test_orders_reach_their_worker_or_say_why_not(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    cluster.dispatcher.order(worker.name, DrainWorker(3.0))
    await cluster.until(lambda: worker.told == [DrainWorker(3.0)])
    with pytest.raises(RequestError, match="worker = 'x': is not known; there are: d0") as unknown:
        cluster.dispatcher.order(WorkerId("x"), DrainWorker(3.0))
    assert unknown.value.status == 404
    worker.is_listening = False
    assert worker.stream is not None
    worker.stream.close("lost")
    await cluster.until(lambda: state_of(cluster, "d0") == "connecting")
    with pytest.raises(RequestError, match="'d0' cannot be reached now") as away:
        cluster.dispatcher.order(worker.name, DrainWorker(3.0))
    assert away.value.status == 503
