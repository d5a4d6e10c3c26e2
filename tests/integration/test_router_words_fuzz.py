"""Whatever a worker says on its stream, the router serves on, and no request is left behind."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from core.ids import RequestId
from core.messages import TokenBatch, WorkerLoad, WorkerToRouter
from core.request import TokenUpdate
from core.worker_record import Role
from tests.dispatch_cluster import Cluster, expected, read, running
from tests.dispatch_workers import MemoryNetwork
from tests.message_strategies import structs

NAMES = st.sampled_from(["r0", "r1", "nobody"]).map(RequestId)
SMALL = st.integers(0, 3)
UPDATES = structs(
    TokenUpdate, request_id=NAMES, dispatch=SMALL, sample_index=SMALL, start_index=SMALL
)
MESSAGES = st.one_of(
    *[
        structs(
            struct,
            request_id=NAMES,
            dispatch=SMALL,
            updates=st.lists(UPDATES, max_size=3).map(tuple),
        )
        for struct in get_args(WorkerToRouter)
    ]
)


def named(message: Any, suffix: str) -> Any:
    """Return a message of this round's requests."""
    if isinstance(message, WorkerLoad):
        return message
    if isinstance(message, TokenBatch):
        return TokenBatch(tuple(named(update, suffix) for update in message.updates))
    return replace(message, request_id=RequestId(message.request_id + suffix))


def test_any_words_of_a_worker_harm_no_other_request() -> None:
    with asyncio.Runner() as runner:
        done, errors = asyncio.Event(), list[dict[str, Any]]()
        runner.get_loop().set_exception_handler(lambda _, context: errors.append(context))

        async def start() -> tuple[Cluster, asyncio.Task[None]]:
            started: asyncio.Future[Cluster] = asyncio.get_running_loop().create_future()

            async def hold() -> None:
                async with running(MemoryNetwork()) as cluster:
                    started.set_result(cluster)
                    await done.wait()

            task = asyncio.create_task(hold())
            return await started, task

        async def end() -> None:
            done.set()
            await holding

        cluster, holding = runner.run(start())
        worker = runner.run(cluster.add("d0", Role.DECODE))
        rounds = itertools.count()

        async def say(messages: list[Any]) -> None:
            suffix = f"-{next(rounds)}"
            streams = [cluster.start(f"r{i}{suffix}", max_tokens=2) for i in range(2)]
            for message in messages:
                worker.say(named(message, suffix))
            await asyncio.sleep(0.001)
            for stream in streams:
                stream.abort()
            assert cluster.dispatcher.num_requests() == 0, messages
            assert not errors, (errors, messages)
            worker.say(WorkerLoad())
            await asyncio.sleep(0.001)

        @settings(
            max_examples=80,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(st.lists(MESSAGES, min_size=1, max_size=4))
        def fuzz(messages: list[Any]) -> None:
            runner.run(say(messages))

        fuzz()

        async def serve() -> None:
            stream = cluster.start("good", max_tokens=2)
            await cluster.until_one_has("good")
            worker.step()
            worker.step()
            assert await read(stream) == [expected(2)]

        runner.run(serve())
        runner.run(end())
