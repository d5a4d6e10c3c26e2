"""What the dispatcher does with workers that leave or change their role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from msgspec.structs import replace

from control_plane.registry import WorkerSeen
from core.config import DisaggregationConfig
from core.errors import RequestError
from core.ids import RequestId, WorkerId
from core.messages import (
    DrainWorker,
    MoveRequest,
    RequestMoved,
    SwitchRole,
    WorkerLoad,
    WorkerOrder,
)
from core.worker_record import Role
from tests.dispatch_cluster import Cluster, expected, read, running, settle
from tests.dispatch_workers import CONFIG, FakeWorker, MemoryNetwork

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
    record = replace(worker.record(), is_draining=True)
    cluster.dispatcher.on_worker_change(WorkerSeen(record))
    assert state_of(cluster, "d0") == "draining"
    stream = cluster.start("r", max_tokens=2)
    await asyncio.sleep(0.02)
    assert worker.started == []
    other_role = replace(worker.record(), role=Role.BOTH)
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
    await cluster.add("d1", Role.DECODE)
    cluster.dispatcher.order(worker.name, DrainWorker(3.0))
    await cluster.until(lambda: worker.told == [DrainWorker(3.0)])
    unknown_is = "worker = 'x': is not known; there are: d0, d1"
    with pytest.raises(RequestError, match=unknown_is) as unknown:
        cluster.dispatcher.order(WorkerId("x"), DrainWorker(3.0))
    assert unknown.value.status == 404
    worker.is_listening = False
    assert worker.stream is not None
    worker.stream.close("lost")
    await cluster.until(lambda: state_of(cluster, "d0") == "connecting")
    with pytest.raises(RequestError, match="'d0' cannot be reached now") as away:
        cluster.dispatcher.order(worker.name, DrainWorker(3.0))
    assert away.value.status == 503


def refused(cluster: Cluster, name: str, order: WorkerOrder) -> RequestError:
    with pytest.raises(RequestError) as error:
        cluster.dispatcher.order(WorkerId(name), order)
    assert (error.value.status, error.value.code) == (409, "last_worker")
    return error.value


TO_PREFILL, TO_DECODE, TO_BOTH = (SwitchRole(role) for role in Role)
LEAVE = DrainWorker(3.0)


async def test_the_last_worker_that_decodes_stays_unless_it_is_forced(cluster: Cluster) -> None:
    last = await cluster.add("d0", Role.DECODE)
    prefill = await cluster.add("p0", Role.PREFILL)
    assert refused(cluster, "d0", TO_PREFILL).param == "role"
    assert refused(cluster, "d0", LEAVE).param == "worker"
    cluster.dispatcher.order(prefill.name, LEAVE)
    cluster.dispatcher.order(last.name, TO_BOTH)
    cluster.dispatcher.order(last.name, LEAVE, is_forced=True)
    await cluster.until(lambda: last.told == [TO_BOTH, LEAVE])
    assert prefill.told == [LEAVE]


async def test_others_count_by_what_they_are_ordered_to_be(cluster: Cluster) -> None:
    """At once, though they have not said yet that they heard."""
    order = cluster.dispatcher.order
    first, second = await cluster.add("d0", Role.DECODE), await cluster.add("d1", Role.DECODE)
    order(first.name, LEAVE)
    refused(cluster, "d1", LEAVE)
    lost = first.stream
    assert lost is not None
    lost.close("lost")  # and perhaps the order with it
    await cluster.until(lambda: first.stream not in (None, lost))
    await settle()
    order(second.name, TO_PREFILL)
    refused(cluster, "d0", TO_PREFILL)
    order(second.name, TO_BOTH)
    order(first.name, TO_PREFILL)
    refused(cluster, "d1", TO_PREFILL)
    order(second.name, TO_DECODE)
    refused(cluster, "d1", LEAVE)


async def test_who_leaves_counts_no_more_whatever_else_it_is_ordered(cluster: Cluster) -> None:
    first = await cluster.add("d0", Role.DECODE)
    await cluster.add("d1", Role.DECODE)
    cluster.dispatcher.order(first.name, LEAVE)
    with pytest.raises(RequestError, match="role = 'both': d0 was ordered to leave") as refusal:
        cluster.dispatcher.order(first.name, TO_BOTH)
    assert (refusal.value.status, refusal.value.code) == (409, "worker_leaving")
    refused(cluster, "d1", LEAVE)
    record = replace(first.record(), role=Role.BOTH)
    cluster.dispatcher.on_worker_change(WorkerSeen(record))  # of an order before that
    refused(cluster, "d1", LEAVE)


async def test_an_unknown_name_is_not_repeated_at_any_length(cluster: Cluster) -> None:
    with pytest.raises(RequestError) as refusal:
        cluster.dispatcher.order(WorkerId("w" * 5000), LEAVE)
    assert len(refusal.value.message) < 200


async def test_who_has_obeyed_counts_as_what_it_is(cluster: Cluster) -> None:
    first, second = await cluster.add("d0", Role.DECODE), await cluster.add("p0", Role.PREFILL)
    cluster.dispatcher.order(second.name, TO_DECODE)
    refused(cluster, "d0", LEAVE)
    record = replace(second.record(), role=Role.DECODE)
    cluster.dispatcher.on_worker_change(WorkerSeen(record))
    cluster.dispatcher.order(first.name, LEAVE)
    refused(cluster, "p0", LEAVE)


async def test_who_drains_or_serves_another_model_is_no_other(cluster: Cluster) -> None:
    await cluster.add("d0", Role.DECODE)
    second = await cluster.add("d1", Role.DECODE)
    await drain(cluster, second)
    refused(cluster, "d0", LEAVE)
    cluster.dispatcher.order(second.name, LEAVE)
    second.say(WorkerLoad())
    record = replace(second.record(), model="another")
    cluster.dispatcher.on_worker_change(WorkerSeen(record))
    await cluster.until(lambda: state_of(cluster, "d1") == "live")
    refused(cluster, "d0", LEAVE)


async def test_in_strict_mode_the_last_prefill_worker_stays() -> None:
    strict = replace(CONFIG, disaggregation=DisaggregationConfig(fallback="strict"))
    async with running(MemoryNetwork(), config=strict) as cluster:
        await cluster.add("d0", Role.DECODE)
        await cluster.add("p0", Role.PREFILL)
        assert "last prefill worker" in refused(cluster, "p0", LEAVE).message
        await cluster.add("b0", Role.BOTH)
        cluster.dispatcher.order(WorkerId("p0"), LEAVE)
