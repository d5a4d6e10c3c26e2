"""Sixty clients while workers are cut, frozen, filled up and forgotten at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest

from core.errors import RequestError
from core.messages import (
    RequestFailed,
)
from core.worker_record import Role
from tests.dispatch_cluster import Cluster, expected, running
from tests.dispatch_workers import MemoryNetwork

pytestmark = pytest.mark.anyio


@pytest.fixture
async def cluster() -> AsyncGenerator[Cluster]:
    async with running(MemoryNetwork()) as found:
        yield found


async def _trouble(cluster: Cluster, dice: random.Random) -> None:
    """Cut, freeze, fill up, forget and unregister workers, one thing every few milliseconds."""
    for _ in range(150):
        await asyncio.sleep(0.003)
        by_state = cluster.dispatcher.requests_by_state()
        assert sum(by_state.values()) == cluster.dispatcher.num_requests(), by_state
        worker = dice.choice(cluster.workers)
        end = cluster.network.router_ends[worker.name]
        kind = dice.random()
        if kind < 0.06:
            end.close("cut")
        elif kind < 0.3:
            worker.is_mute = not worker.is_mute
            if end.is_open:
                end.suspect(worker.is_mute)
        elif kind < 0.5:
            worker.refusal = dice.choice([None, None, "overloaded", "draining"])
        elif kind < 0.6 and worker.jobs and worker.stream is not None:
            request_id = dice.choice(list(worker.jobs))
            start, _ = worker.jobs.pop(request_id)
            worker.say(RequestFailed(request_id, start.dispatch, "x", retriable=True))
        elif kind < 0.65:
            cluster.unregister()
            cluster.register()
    for worker in cluster.workers:
        worker.refusal, worker.is_mute = None, False
        if cluster.network.router_ends[worker.name].is_open:
            cluster.network.router_ends[worker.name].suspect(False)


async def _client(cluster: Cluster, number: int, dice: random.Random) -> str:
    """Send one request and check all that comes back; return how it ended."""
    await asyncio.sleep(dice.random() * 0.4)
    num_samples, num_tokens = dice.randint(1, 2), dice.randint(1, 40)
    outputs: list[list[int]] = [[] for _ in range(num_samples)]
    leaves_after = dice.choice([None, None, None, 5])
    try:
        stream = cluster.start(f"r{number}", n=num_samples, max_tokens=num_tokens)
        async for updates in stream:
            for update in updates:
                assert update.start_index == len(outputs[update.sample_index])
                outputs[update.sample_index].extend(update.token_ids)
            if leaves_after is not None and len(outputs[0]) >= leaves_after:
                stream.abort()
                leaves_after = None
    except RequestError as error:
        ending = str(error.status)
    else:
        ending = "done"
    for sample, tokens in enumerate(outputs):
        assert tokens == expected(len(tokens), sample)
        assert ending != "done" or len(tokens) in (num_tokens, *range(5, 41))
    return ending


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_nothing_is_lost_repeated_or_left_whatever_workers_do(
    cluster: Cluster, seed: int
) -> None:
    dice = random.Random(seed)
    for name in ("d0", "d1", "d2", "p0"):
        await cluster.add(name, Role.PREFILL if name == "p0" else Role.DECODE)
    async with asyncio.TaskGroup() as group:
        serving = [group.create_task(worker.serve()) for worker in cluster.workers]
        trouble = group.create_task(_trouble(cluster, dice))
        clients = [group.create_task(_client(cluster, number, dice)) for number in range(60)]
        endings = [await client for client in clients]
        await trouble
        await cluster.until(lambda: not any(worker.jobs for worker in cluster.workers))
        for task in serving:
            task.cancel()
    assert set(endings) <= {"done", "429", "503"}
    assert endings.count("done") > 5, "on a starved machine heartbeats are late besides"
    assert cluster.dispatcher.num_requests() == 0
    assert all(worker["requests_of_this_router"] == 0 for worker in cluster.status())
    assert all(worker["requests_on_their_way"] == 0 for worker in cluster.status())
