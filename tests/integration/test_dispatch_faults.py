"""What the dispatcher does with workers that refuse, fail, freeze, die and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from control_plane.registry import WorkerSuspect
from core.block_hash import hash_blocks
from core.errors import RequestError
from core.ids import Boot, RequestId
from core.lifetime import PrefillDecision, RequestTrace
from core.messages import (
    AbortRequest,
    PathReport,
    PromptScored,
    RequestFailed,
    RequestRefused,
    TokenBatch,
    WorkerLoad,
)
from core.request import PromptLogprobs, TokenUpdate
from core.worker_record import Role
from router.dispatch.request_state import RetryRules
from tests.dispatch_cluster import Cluster, expected, read, running, settle
from tests.dispatch_workers import FINGERPRINT, GrpcNetwork, MemoryNetwork, token

pytestmark = pytest.mark.anyio


@pytest.fixture
async def cluster() -> AsyncGenerator[Cluster]:
    async with running(MemoryNetwork()) as found:
        yield found


@pytest.mark.parametrize("network", [MemoryNetwork, GrpcNetwork])
async def test_a_worker_lost_while_streaming_loses_no_token(network: Callable[[], Any]) -> None:
    async with running(network()) as cluster:
        await cluster.add("d0", Role.DECODE)
        await cluster.add("d1", Role.DECODE)
        stream = cluster.start("r", n=2, max_tokens=9)
        await cluster.until_one_has("r")
        first = cluster.find("r")
        for _ in range(3):
            first.step()
        await cluster.until(lambda: stream.num_updates == 6)
        assert first.stream is not None
        first.stream.close("killed")
        await cluster.until_one_has("r", besides=first)
        second = cluster.find("r", besides=first)
        assert second.started[0].dispatch == 2
        assert second.started[0].request.outputs == (
            tuple(expected(3, 0)),
            tuple(expected(3, 1)),
        )
        for _ in range(6):
            second.step()
        assert await read(stream, 2) == [expected(9, 0), expected(9, 1)]


async def test_a_refusal_goes_to_the_next_worker_and_429_when_all_refuse(cluster: Cluster) -> None:
    full, free = await cluster.add("d0", Role.DECODE), await cluster.add("d1", Role.DECODE)
    full.refusal = "overloaded"
    streams = [cluster.start(f"r{i}", max_tokens=1) for i in range(8)]
    await settle()
    assert len(full.started) > 0
    assert len(free.jobs) == 8
    free.step()
    for stream in streams:
        assert await read(stream) == [expected(1)]
    free.refusal = "overloaded"
    with pytest.raises(RequestError) as refused:
        await read(cluster.start("r"))
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1.0)


async def test_the_last_worker_lost_is_waited_for_and_then_given_up(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    stream = cluster.start("r", max_tokens=2)
    await settle()
    worker.step()
    await settle()
    assert worker.stream is not None
    worker.stream.close("killed")
    await cluster.until(lambda: len(worker.started) == 2)  # connected and sent again
    worker.step()
    assert await read(stream) == [expected(2)]
    doomed = cluster.start("s")
    await settle()
    worker.is_listening = False
    assert worker.stream is not None
    worker.stream.close("killed")
    await settle()
    assert cluster.dispatcher.requests_by_state()["waiting"] == 1
    with pytest.raises(RequestError) as lost:
        await read(doomed)
    assert lost.value.status == 503
    assert lost.value.retry_after_s


async def test_a_frozen_worker_loses_its_requests_and_its_twin_is_told(cluster: Cluster) -> None:
    for name in ("d0", "d1"):
        await cluster.add(name, Role.DECODE)
    stream = cluster.start("r", max_tokens=3)
    await settle()
    frozen = cluster.find("r")
    frozen.step()
    await settle()
    router_end = cluster.network.router_ends[frozen.name]
    router_end.suspect(True)
    assert any(worker["state"] == "suspect" for worker in cluster.status())
    await cluster.until_one_has("r", besides=frozen)
    other = cluster.find("r", besides=frozen)
    frozen.jobs.setdefault(RequestId("r"), (frozen.started[0], {0: 1}))
    frozen.step()  # thawed: says on
    router_end.suspect(False)
    await settle()
    assert frozen.aborted == [AbortRequest(RequestId("r"), 1)]
    for _ in range(2):
        other.step()
    assert await read(stream) == [expected(3)]


async def test_heartbeats_that_come_back_in_time_change_nothing(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    await cluster.add("d1", Role.DECODE)
    stream = cluster.start("r", max_tokens=1)
    await settle()
    worker = cluster.find("r")
    end = cluster.network.router_ends[worker.name]
    end.suspect(True)
    end.suspect(False)
    await asyncio.sleep(0.1)
    worker.step()
    assert await read(stream) == [expected(1)]
    assert worker.aborted == []


async def test_a_worker_that_says_it_is_idle_is_taken_at_its_word(cluster: Cluster) -> None:
    for name in ("d0", "d1"):
        await cluster.add(name, Role.DECODE)
    stream = cluster.start("r", max_tokens=1)
    await settle()
    forgetful = cluster.find("r")
    forgetful.jobs.clear()

    async def heartbeats() -> None:
        while True:
            forgetful.say(WorkerLoad())
            await asyncio.sleep(0.02)

    beating = asyncio.ensure_future(heartbeats())
    await cluster.until_one_has("r")
    beating.cancel()
    assert forgetful.aborted == [AbortRequest(RequestId("r"), 1)]
    cluster.find("r").step()
    assert await read(stream) == [expected(1)]


async def test_a_request_without_time_ends(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    stream = cluster.start("r", timeout_s=0.05)
    with pytest.raises(RequestError) as late:
        await read(stream)
    assert (late.value.status, late.value.code) == (503, "request_timeout")
    assert late.value.retry_after_s == 1.0
    await settle()
    assert worker.aborted == [AbortRequest(RequestId("r"), 1)]


async def test_a_deleted_key_keeps_a_live_stream_and_drops_a_dead_one(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    cluster.dispatcher.on_worker_change(WorkerSuspect(worker.name, Boot("another")))
    assert cluster.status()[0]["registered"]
    cluster.unregister()
    stream = cluster.start("r", max_tokens=1)
    await settle()
    worker.step()
    assert await read(stream) == [expected(1)]
    assert cluster.dispatcher.is_ready()
    cluster.network.router_ends["d0"].suspect(True)
    assert cluster.status() == []
    await cluster.until(lambda: worker.stream is None)
    cluster.register()
    await cluster.until(lambda: worker.stream is not None)
    assert cluster.dispatcher.is_ready()
    cluster.unregister()
    assert worker.stream is not None
    worker.stream.close("killed")
    await settle()
    assert cluster.status() == []


async def test_another_boot_replaces_the_one_before(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    prompt = tuple(range(100))
    hashes = hash_blocks(prompt, block_size=16, fingerprint=bytes.fromhex(FINGERPRINT))
    cluster.dispatcher.on_snapshot(worker.name, worker.boot, hashes)
    stream = cluster.start("r", max_tokens=2)
    await settle()
    worker.step()
    await settle()
    old_stream, worker.boot = worker.stream, Boot("f" * 32)
    cluster.register()
    assert cluster.dispatcher.cluster_status()["indexed_blocks"] == 0
    assert old_stream is not None
    await cluster.until(lambda: RequestId("r") in worker.jobs and worker.stream is not old_stream)
    assert worker.started[-1].dispatch >= 2
    worker.step()
    assert await read(stream) == [expected(2)]


async def test_a_stranger_is_told_once_to_stop(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    for index in range(3):
        worker.say(TokenBatch((TokenUpdate(RequestId("ghost"), 0, 4, index, (1,)),)))
    worker.say(RequestFailed(RequestId("ghost"), 4, "x", retriable=True))
    worker.say(RequestRefused(RequestId("ghost"), 4, "draining", "x"))
    worker.say(PathReport(RequestId("ghost"), 4, RequestTrace("d0", PrefillDecision.LOCAL)))
    await settle()
    assert worker.aborted == [AbortRequest(RequestId("ghost"), 4)]


async def test_a_worker_that_does_not_answer_is_tried_again_with_back_off(
    cluster: Cluster,
) -> None:
    worker = await cluster.network.add("d0", Role.DECODE)
    worker.is_listening = False
    cluster.workers.append(worker)
    cluster.register()
    await cluster.until(lambda: cluster.network.num_refused == 2)
    assert cluster.status()[0]["state"] == "connecting"
    worker.is_listening = True
    await cluster.until(lambda: worker.stream is not None)
    assert cluster.dispatcher.is_ready()


async def test_failures_go_elsewhere_or_to_the_client(cluster: Cluster) -> None:
    for name in ("d0", "d1"):
        await cluster.add(name, Role.DECODE)
    stream = cluster.start("r", max_tokens=2)
    await settle()
    worker = cluster.find("r")
    worker.step()
    del worker.jobs[RequestId("r")]
    worker.say(RequestFailed(RequestId("r"), 1, "no block", retriable=True))
    await settle()
    second = cluster.find("r")
    assert second is not worker
    second.step()
    assert await read(stream) == [expected(2)]
    doomed = cluster.start("s")
    await settle()
    holder = cluster.find("s")
    del holder.jobs[RequestId("s")]
    holder.say(RequestFailed(RequestId("s"), 1, "step failed", retriable=False))
    with pytest.raises(RequestError, match="step failed") as failed:
        await read(doomed)
    assert failed.value.status == 500


async def test_a_worker_that_comes_up_is_used_before_the_wait_is_over() -> None:
    rules = RetryRules(first_wait_s=30.0, max_wait_s=30.0, lost_patience_s=60.0)
    async with running(MemoryNetwork(), rules=rules) as cluster:
        worker = await cluster.add("d0", Role.DECODE)
        stream = cluster.start("r", max_tokens=1)
        await settle()
        assert worker.stream is not None
        worker.stream.close("killed")
        await cluster.until(lambda: len(worker.started) == 2)
        worker.step()
        assert await read(stream) == [expected(1)]


async def test_a_worker_lost_while_it_scores_a_prompt_loses_no_score(cluster: Cluster) -> None:
    await cluster.add("d0", Role.DECODE)
    await cluster.add("d1", Role.DECODE)
    stream = cluster.start("r", 1, 2, 3, 4, max_tokens=1, prompt_logprobs=0)
    await cluster.until_one_has("r")
    first = cluster.find("r")
    parts = [PromptLogprobs(at, (-float(at),), (at,)) for at in (1, 2, 3)]
    first.score(RequestId("r"), parts[0])
    first.score(RequestId("r"), parts[1])
    await cluster.until(lambda: len(stream.prompt_logprobs) == 2)
    assert first.stream is not None
    first.stream.close("killed")
    await cluster.until_one_has("r", besides=first)
    second = cluster.find("r", besides=first)
    for part in parts:
        second.score(RequestId("r"), part)
    second.step()
    assert await read(stream) == [[token((1, 2, 3, 4), 0, 0)]]
    assert stream.prompt_logprobs == parts
    second.say(PromptScored(RequestId("r"), 2, parts[0]))  # late: nobody asks any more
    await settle()


async def test_cached_tokens_are_not_those_of_a_dispatch_behind_a_lost_one(
    cluster: Cluster,
) -> None:
    """The first worker may have computed what the second finds; a refusal has not."""
    first = await cluster.add("d0", Role.DECODE)
    first.refusal = "overloaded"
    refused = cluster.start("refused", max_tokens=1)
    await settle()
    first.refusal = None
    second = await cluster.add("d1", Role.DECODE)
    await cluster.until_one_has("refused")
    cluster.find("refused").step()
    await read(refused)
    assert refused.trace is not None
    assert refused.trace.cached_tokens > 0, "the fake worker says the dispatch's number"
    lost = cluster.start("lost", max_tokens=1)
    await cluster.until_one_has("lost")
    dying = cluster.find("lost")
    assert dying.stream is not None
    dying.stream.close("killed")
    await cluster.until_one_has("lost", besides=dying)
    cluster.find("lost", besides=dying).step()
    await read(lost)
    assert lost.trace is not None
    assert (lost.trace.attempt, lost.trace.cached_tokens) == (2, 0)
    assert second.started
