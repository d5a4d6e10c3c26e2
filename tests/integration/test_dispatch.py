"""What the dispatcher does with workers that serve: requests, routes, ends, what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from control_plane.ledger.reader import LedgerListener
from control_plane.registry import WorkerChange, WorkerSuspect
from core.block_hash import hash_blocks
from core.config import DisaggregationConfig
from core.errors import RequestError
from core.ids import Boot, RequestId, WorkerId
from core.lifetime import Stamp
from core.messages import (
    AbortRequest,
    RequestRefused,
    WorkerLoad,
)
from core.request import FinishReason
from core.worker_record import Role
from router.dispatch.interface import Disaggregate, Dispatcher
from router.dispatch.request_state import RetryRules
from tests.dispatch_cluster import Cluster, expected, read, running, settle
from tests.dispatch_workers import CONFIG, FINGERPRINT, GrpcNetwork, MemoryNetwork, token

pytestmark = pytest.mark.anyio


@pytest.fixture
async def cluster() -> AsyncGenerator[Cluster]:
    async with running(MemoryNetwork()) as found:
        yield found


@pytest.mark.parametrize("network", [MemoryNetwork, GrpcNetwork])
async def test_requests_run_over_the_streams(network: Callable[[], Any]) -> None:
    async with running(network()) as cluster:
        assert not cluster.dispatcher.is_ready()
        assert cluster.dispatcher.served_model() is None
        await cluster.add("p0", Role.PREFILL)
        assert not cluster.dispatcher.is_ready()
        assert cluster.dispatcher.served_model() is None
        decode = await cluster.add("d0", Role.DECODE)
        assert cluster.dispatcher.is_ready()
        model = cluster.dispatcher.served_model()
        assert model is not None
        assert (model.name, model.max_model_len, model.block_size) == ("model", 4096, 16)
        server = asyncio.ensure_future(decode.serve())
        streams = [cluster.start(f"r{i}", n=2, max_tokens=20) for i in range(20)]
        for stream in streams:
            assert await read(stream, 2) == [expected(20, 0), expected(20, 1)]
            trace = stream.trace
            assert trace is not None
            assert (trace.decode_worker, trace.prefill_worker) == ("d0", "p0")
            dispatched = stream.lifetime.at(Stamp.DISPATCHED)
            first_token = stream.lifetime.at(Stamp.FIRST_TOKEN)
            assert dispatched is not None
            assert first_token is not None
            assert first_token > dispatched
        server.cancel()
        assert [c.worker_id for c in decode.started[0].candidates] == ["p0"]
        assert 0 < decode.started[0].remaining_s <= 5.0
        assert decode.aborted == []


async def test_without_a_worker_a_request_is_refused(cluster: Cluster) -> None:
    with pytest.raises(RequestError) as refused:
        cluster.start("r")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5.0)
    worker = await cluster.add("d0", Role.DECODE)
    with pytest.raises(RequestError) as always:
        await read(cluster.start("r", disaggregate=Disaggregate.ALWAYS))
    assert always.value.code == "no_prefill_worker"
    assert cluster.dispatcher.num_requests() == 0
    assert worker.started == []


async def test_a_request_waits_for_the_prefill_worker_that_it_needs() -> None:
    rules = RetryRules(first_wait_s=30.0, max_wait_s=30.0, fresh_patience_s=60.0)
    async with running(MemoryNetwork(), rules=rules) as cluster:
        worker = await cluster.add("d0", Role.DECODE)
        stream = cluster.start("r", max_tokens=1, disaggregate=Disaggregate.ALWAYS)
        assert cluster.dispatcher.requests_by_state()["waiting"] == 1
        await cluster.add("p0", Role.PREFILL)
        await cluster.until(lambda: len(worker.started) == 1)
        worker.step()
        assert await read(stream) == [expected(1)]
        assert stream.trace is not None
        assert stream.trace.attempt == 1


async def test_strict_mode_needs_a_prefill_worker() -> None:
    strict = msgspec.structs.replace(CONFIG, disaggregation=DisaggregationConfig("strict"))
    async with running(MemoryNetwork(), strict) as cluster:
        decode = await cluster.add("d0", Role.DECODE)
        assert not cluster.dispatcher.is_ready()
        with pytest.raises(RequestError) as refused:
            await read(cluster.start("r"))
        assert refused.value.code == "no_prefill_worker"
        await cluster.add("p0", Role.PREFILL)
        await settle()
        assert cluster.dispatcher.is_ready()
        stream = cluster.start("r", 1, 2, 3, max_tokens=1)
        await settle()
        assert not decode.started[0].allow_local
        decode.step()
        assert await read(stream) == [[token((1, 2, 3), 0, 0)]]


async def test_a_worker_of_role_both_serves_alone(cluster: Cluster) -> None:
    worker = await cluster.add("b0", Role.BOTH)
    assert cluster.dispatcher.is_ready()
    stream = cluster.start("r", max_tokens=1)
    await settle()
    assert worker.started[0].candidates == ()
    worker.step()
    assert await read(stream) == [expected(1)]


async def test_a_name_in_use_is_refused(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    stream = cluster.start("r")
    with pytest.raises(RequestError) as duplicate:
        cluster.start("r")
    assert duplicate.value.status == 400
    await settle()
    worker.step()
    stream.abort()
    await settle()  # its token comes after its end
    assert worker.aborted == [AbortRequest(RequestId("r"), 1)]
    assert worker.started == worker.started[:1]


async def test_an_abort_reaches_the_worker_and_ends_the_stream(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    stream = cluster.start("r", n=2)
    await settle()
    cluster.dispatcher.cancel(RequestId("unknown"))
    cluster.dispatcher.cancel(RequestId("r"))
    cluster.dispatcher.cancel(RequestId("r"))
    updates = [update async for batch in stream for update in batch]
    assert [update.finish_reason for update in updates] == [FinishReason.ABORT] * 2
    await settle()
    assert worker.aborted == [AbortRequest(RequestId("r"), 1)]
    assert worker.jobs == {}


async def test_stop_strings_end_one_sample_and_then_the_request(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    stream = cluster.start("r", n=2)
    stream.finish_sample(0)
    await settle()
    assert worker.aborted == [AbortRequest(RequestId("r"), 1, 0)]
    worker.step()
    await settle()
    stream.finish_sample(1)
    stream.finish_sample(1)
    assert await read(stream, 2) == [[], expected(1, 1)]
    await settle()
    assert worker.aborted[1:] == [AbortRequest(RequestId("r"), 1, 1)]


async def test_no_hit_is_predicted_for_a_prompt_to_be_scored(cluster: Cluster) -> None:
    """All of it is computed, whatever is cached."""
    worker = await cluster.add("d0", Role.DECODE)
    hashes = hash_blocks(tuple(range(100)), block_size=16, fingerprint=bytes.fromhex(FINGERPRINT))
    cluster.dispatcher.on_delta(WorkerId("d0"), worker.boot, hashes, [])
    predicted: dict[str, int] = {}
    for name, wanted in (("plain", None), ("scored", 0)):
        stream = cluster.start(name, prompt_logprobs=wanted)
        decision = cluster.dispatcher._live[RequestId(name)].decision
        assert decision is not None
        predicted[name] = decision.prefill_tokens
        stream.abort()
    assert predicted == {"plain": 100 - 96, "scored": 100}


async def test_prefix_hits_of_the_ledger_decide(cluster: Cluster) -> None:
    for name in ("p0", "p1"):
        await cluster.add(name, Role.PREFILL)
    decode = await cluster.add("d0", Role.DECODE)
    hashes = hash_blocks(tuple(range(100)), block_size=16, fingerprint=bytes.fromhex(FINGERPRINT))
    for name, worker in zip(("p0", "p1"), cluster.workers, strict=False):
        cluster.dispatcher.on_delta(WorkerId(name), worker.boot, hashes[: 5 * (name == "p1")], [])
    streams = [cluster.start(f"r{i}", max_tokens=1) for i in range(2)]
    await settle()
    assert {start.candidates[0].worker_id for start in decode.started} == {"p1"}
    cluster.dispatcher.on_gone(WorkerId("p1"))
    cluster.dispatcher.on_delta(decode.name, decode.boot, hashes, [])
    streams.append(cluster.start("local", max_tokens=1))
    await settle()
    decode.step()
    for stream in streams:
        assert await read(stream) == [expected(1)]
    registry = CollectorRegistry()
    registry.register(cluster.dispatcher.metrics)
    decisions = "dovetail:disaggregation_decisions_total"
    assert registry.get_sample_value(decisions, {"reason": "disaggregated"}) == 2
    assert registry.get_sample_value(decisions, {"reason": "local_hit"}) == 1
    assert registry.get_sample_value("dovetail:actual_ttft_seconds_count") == 3


async def test_a_burst_between_two_loads_does_not_all_go_to_who_looked_idle(
    cluster: Cluster,
) -> None:
    for name in ("p0", "p1", "d0", "d1"):
        worker = await cluster.add(name, Role.PREFILL if name[0] == "p" else Role.DECODE)
        if name == "p1":
            worker.say(WorkerLoad(waiting_prompt_tokens=1000))
        if name == "d1":
            worker.say(WorkerLoad(num_running=8))
    await settle()
    streams = [cluster.start(f"r{i}", max_tokens=1) for i in range(40)]
    await settle()
    decodes = [worker for worker in cluster.workers if worker.role is Role.DECODE]
    assert [len(worker.started) >= 12 for worker in decodes] == [True, True]
    firsts = [start.candidates[0].worker_id for worker in decodes for start in worker.started]
    assert 12 <= firsts.count(WorkerId("p0")) <= 28
    for worker in decodes:
        worker.step()
    for stream in streams:
        await read(stream)


async def test_the_gauges_sum_to_the_requests_in_flight(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    streams = [cluster.start(f"r{i}", max_tokens=2) for i in range(3)]
    assert cluster.dispatcher.requests_by_state() == {
        "waiting": 0,
        "dispatched": 3,
        "streaming": 0,
    }
    await settle()
    worker.step()
    await settle()
    registry = CollectorRegistry()
    registry.register(cluster.dispatcher.metrics)
    assert registry.get_sample_value("dovetail:requests", {"state": "streaming"}) == 3
    for stream in streams:
        stream.abort()
    assert registry.get_sample_value("dovetail:requests", {"state": "streaming"}) == 0


async def test_status_shows_loads(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    worker.say(WorkerLoad(num_running=3, num_waiting=2, blocks_total=10, blocks_owned=4))
    await settle()
    (shown,) = cluster.status()
    assert shown["queues"]["running"] == 3
    assert shown["blocks"]["owned"] == 4
    assert (shown["fences"], shown["path_failure"], shown["paired"]) == (0, "", True)
    assert (shown["state"], shown["role"], shown["boot"]) == ("live", "decode", worker.boot)
    assert msgspec.json.encode(cluster.dispatcher.cluster_status())
    worker.say(WorkerLoad(is_draining=True))
    await settle()
    assert cluster.status()[0]["state"] == "draining"
    registry = CollectorRegistry()
    registry.register(cluster.dispatcher.metrics)
    states = {"connecting": 0, "live": 0, "suspect": 0, "draining": 1}
    for state, count in states.items():
        assert registry.get_sample_value("dovetail:workers", {"state": state}) == count


async def test_who_can_move_no_kv_is_shown_and_not_paired_until_it_can() -> None:
    strict = msgspec.structs.replace(CONFIG, disaggregation=DisaggregationConfig("strict"))
    async with running(MemoryNetwork(), strict) as cluster:
        decode = await cluster.add("d0", Role.DECODE)
        prefill = await cluster.add("p0", Role.PREFILL)
        assert cluster.dispatcher.is_ready()
        prefill.say(WorkerLoad(path_failure="no KV moves", is_unpaired=True, fences=2))
        await cluster.until(lambda: not cluster.dispatcher.is_ready())
        shown = cluster.status()[1]
        assert (shown["fences"], shown["path_failure"], shown["paired"]) == (
            2,
            "no KV moves",
            False,
        )
        with pytest.raises(RequestError) as refused:
            await read(cluster.start("r"))
        assert (refused.value.status, refused.value.code) == (503, "no_prefill_worker")
        assert not decode.started
        prefill.say(WorkerLoad())
        await cluster.until(cluster.dispatcher.is_ready)
        stream = cluster.start("again", max_tokens=1)
        await cluster.until(lambda: bool(decode.jobs))
        assert [one.worker_id for one in decode.started[0].candidates] == ["p0"]
        decode.step()
        await read(stream)


async def test_attempts_are_counted_when_a_request_ends(cluster: Cluster) -> None:
    first = await cluster.add("d0", Role.DECODE)
    second = await cluster.add("d1", Role.DECODE)
    streams = [cluster.start(f"r{i}", max_tokens=1) for i in range(4)]
    await cluster.until(lambda: len(first.jobs) + len(second.jobs) == 4)
    num_moved = len(first.jobs)
    cluster.network.router_ends["d0"].close("lost")
    await cluster.until(lambda: len(second.jobs) == 4)
    second.step()
    for stream in streams:
        await read(stream)
    assert cluster.dispatcher.cluster_status()["attempts"] == {
        "requests": 4,
        "retried": num_moved,
        "attempts": 4 + num_moved,
    }
    registry = CollectorRegistry()
    registry.register(cluster.dispatcher.metrics)
    once = registry.get_sample_value("dovetail:request_attempts_bucket", {"le": "1.0"})
    assert once == 4 - num_moved


async def test_stopping_ends_every_request_with_503() -> None:
    network = MemoryNetwork()
    cluster = Cluster(network)
    run = asyncio.ensure_future(cluster.dispatcher.run())
    worker = await cluster.add("d0", Role.DECODE)
    stream = cluster.start("r")
    await cluster.dispatcher.stop()
    with pytest.raises(RequestError) as stopped:
        await read(stream)
    assert (stopped.value.status, stopped.value.code) == (503, "shutting_down")
    await asyncio.wait_for(run, 5)
    await settle()
    assert worker.stream is None
    with pytest.raises(RequestError):
        cluster.start("s")


async def test_the_dispatcher_is_what_its_neighbours_expect(cluster: Cluster) -> None:
    """The type checker holds this."""
    api: Dispatcher = cluster.dispatcher
    ledger: LedgerListener = cluster.dispatcher
    changes: Callable[[WorkerChange], None] = cluster.dispatcher.on_worker_change
    assert api.num_requests() == 0
    ledger.on_gone(WorkerId("unknown"))
    changes(WorkerSuspect(WorkerId("unknown"), Boot("")))


async def test_the_load_in_a_refusal_and_preemptions_in_heartbeats_are_believed(
    cluster: Cluster,
) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    stream = cluster.start("r", max_tokens=1)
    await cluster.until(lambda: bool(worker.started))
    full = WorkerLoad(num_waiting=256, preemptions=3)
    worker.say(RequestRefused(RequestId("r"), 1, "overloaded", "full", full))
    await cluster.until(lambda: len(worker.started) == 2)
    (status,) = cluster.status()
    assert status["queues"]["waiting"] == 256
    assert status["queues"]["preemptions"] == 3
    worker.step()
    assert await read(stream) == [expected(1)]
