"""Whatever bytes and messages come over a stream: a clear error for who sent them, and a worker
that serves on with every block back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from control_plane.rpc import codec
from control_plane.rpc.client import connect
from control_plane.rpc.grpc_wire import ClientWire, new_channel, open_call
from control_plane.rpc.server import RpcServer
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import (
    AbortRequest,
    BlockRun,
    MoveRequest,
    PrefillAsk,
    PrefillCandidate,
    RegionDescriptor,
    SettleHandoff,
    StartRequest,
)
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core.worker_record import Hello
from tests.pool_cluster import PoolCluster, pool_cluster, request_of, served

WORKER = Hello(kind="worker", name="decode-0", boot=Boot("b1"))
ROUTER = Hello(kind="router", name="router-0", boot=Boot("r1"))
PATIENCE_S = 60.0
"""Generous: a machine may give its processors to others for ten seconds."""

CONFIG, CLOCK = ControlPlaneConfig(), SystemClock()
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
PARAMS = SamplingParams()
GOOD = (
    codec.encode(StartRequest(EngineRequest(RequestId("r"), (1, 2), PARAMS), 1, (), 9.0)),
    codec.encode(AbortRequest(RequestId("r"), 1)),
    codec.encode(SettleHandoff(HandoffId(RequestId("r"), Attempt(1, 1)))),
    codec.encode_closing("bye"),
    codec.HEARTBEAT,
)


def mutations(frame: bytes) -> st.SearchStrategy[bytes]:
    """Return frames with a piece cut out and another put in."""
    cuts = st.tuples(st.integers(0, len(frame)), st.integers(0, 4), st.binary(max_size=4))
    return cuts.map(lambda cut: frame[: cut[0]] + cut[2] + frame[cut[0] + cut[1] :])


FRAMES = st.lists(
    st.binary(max_size=40) | st.sampled_from(GOOD).flatmap(mutations), min_size=1, max_size=3
)


class Listener:
    """Counts streams that are open; reads whatever is understood."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_heard = 0
        self.none_open = asyncio.Event()
        self.none_open.set()

    def on_open(self, stream: Any) -> None:
        self.num_open += 1
        self.none_open.clear()

    def on_message(self, stream: Any, message: Any) -> None:
        self.num_heard += 1

    def on_suspect(self, stream: Any, *, suspect: bool) -> None: ...

    def on_closed(self, stream: Any, reason: str) -> None:
        assert reason
        self.num_open -= 1
        if not self.num_open:
            self.none_open.set()


@pytest.mark.parametrize("says_hello", [True, False])
def test_any_bytes_end_their_stream_and_nothing_else(
    caplog: pytest.LogCaptureFixture, *, says_hello: bool
) -> None:
    """At a worker's server, behind a hello and in its place."""
    listener, reasons = Listener(), list[str]()

    async def send(address: str, frames: list[bytes]) -> None:
        channel = new_channel(address)
        call = open_call(channel)
        wire = ClientWire(call)
        try:
            for frame in [codec.encode_hello(ROUTER)] * says_hello + frames:
                await wire.write(frame)
            await call.done_writing()
            async with asyncio.timeout(PATIENCE_S):
                while (frame := await wire.read()) is not None:
                    if frame.HasField("closing"):
                        reasons.append(frame.closing)
        except ConnectionError as error:
            reasons.append(str(error))
        finally:
            await channel.close(None)

    with asyncio.Runner() as runner, ExitStack() as stack:
        server = RpcServer(lambda: WORKER, config=CONFIG, clock=CLOCK)
        # Whatever fails: a server that nobody stopped waits for its threads in a later test.
        stack.callback(lambda: runner.run(server.stop(5.0)))
        server.listen("router", listener)
        port = runner.run(server.start("127.0.0.1", 0))
        address = f"127.0.0.1:{port}"
        process = psutil.Process()
        runner.run(send(address, list(GOOD)))
        tasks, files = runner.run(num_tasks()), process.num_fds()

        @SETTINGS
        @given(FRAMES)
        def fuzz(frames: list[bytes]) -> None:
            runner.run(send(address, frames))

        fuzz()
        runner.run(settled(listener))
        assert all(reasons), "each says why"
        runner.run(no_more_than(tasks))
        assert process.num_fds() <= files + 8
        stream = runner.run(connect(address, ROUTER, listener, config=CONFIG, clock=CLOCK))
        stream.close("done")
        runner.run(settled(listener))
        runner.run(send(address, [b"\xff"]))
        assert ("unreadable frame from router-0" if says_hello else "no hello") in reasons[-1]
        assert "ERROR" not in [record.levelname for record in caplog.records], caplog.text


async def num_tasks() -> int:
    await asyncio.sleep(0.05)
    return len(asyncio.all_tasks())


async def no_more_than(num_before: int) -> None:
    """Return once there are no more tasks than before: goodbyes take a second at most."""
    async with asyncio.timeout(PATIENCE_S):
        while await num_tasks() > num_before:
            pass


async def settled(listener: Listener) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await listener.none_open.wait()


SMALL = st.integers(0, 4)
NAMES = st.sampled_from(["a", "b", "c"]).map(RequestId)
TOKENS = st.integers(0, 2000)
SAMPLING = st.builds(
    SamplingParams,
    n=SMALL,
    max_tokens=SMALL,
    min_tokens=SMALL,
    temperature=st.floats(allow_nan=True),
    top_k=SMALL,
    top_p=st.floats(allow_nan=True),
    logit_bias=st.lists(st.tuples(TOKENS, st.floats()), max_size=2).map(tuple),
    stop_token_ids=st.lists(TOKENS, max_size=2).map(tuple),
    logprobs=st.none() | SMALL,
    prompt_logprobs=st.none() | SMALL,
    bad_words=st.lists(st.lists(TOKENS, max_size=2).map(tuple), max_size=2).map(tuple),
)
REQUESTS = st.builds(
    EngineRequest,
    request_id=NAMES,
    prompt=st.lists(TOKENS, max_size=30).map(tuple),
    sampling=SAMPLING,
    outputs=st.lists(st.lists(TOKENS, max_size=3).map(tuple), max_size=3).map(tuple),
    priority=st.integers(-3, 3),
)
CANDIDATES = st.builds(
    PrefillCandidate,
    worker_id=st.just(WorkerId("prefill-0")),
    boot=st.just(Boot("nobody")),
    address=st.just("nowhere"),
)
STARTS = st.builds(
    StartRequest,
    request=REQUESTS,
    dispatch=SMALL,
    candidates=st.lists(CANDIDATES, max_size=1).map(tuple),
    remaining_s=st.sampled_from([0.0, -1.0, 0.2, float("nan")]),
    allow_local=st.booleans(),
)
ABORTS = st.builds(AbortRequest, NAMES, SMALL, st.none() | SMALL)
HANDOFFS = st.builds(HandoffId, NAMES, st.builds(Attempt, SMALL, SMALL))
RUNS = st.builds(BlockRun, st.integers(0, 80).map(BlockId), st.integers(0, 9))


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[asyncio.Runner, PoolCluster]]:
    """Yield a decode and a prefill worker, and the loop that they live on."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        cluster = runner.run(stack.enter_async_context(pool_cluster()))
        yield runner, cluster
        runner.run(stack.aclose())


def serves_on(runner: asyncio.Runner, cluster: PoolCluster, name: str) -> None:
    """Serve a good request on both workers, and see every block back."""

    async def check() -> None:
        for machine in (cluster.decode_machine, *cluster.prefill_machines):
            assert not machine.task.done(), machine.task
        request = request_of(name, range(10, 40))
        answer = await served(cluster.router.start(request, cluster.candidates), request)
        cluster.expect(request, answer)
        await cluster.until_idle()

    runner.run(check())


def test_any_words_of_a_router_harm_nobody_else(
    pools: tuple[asyncio.Runner, PoolCluster],
) -> None:
    runner, cluster = pools

    async def say(messages: list[Any]) -> None:
        for message in messages:
            cluster.router.stream.send(message)
        await asyncio.sleep(0.01)
        for name in "abc":
            for dispatch in range(5):
                cluster.router.stream.send(AbortRequest(RequestId(name), dispatch))
        await asyncio.sleep(0.005)
        assert not cluster.decode_machine.task.done(), messages
        cluster.router.answers.clear()

    @SETTINGS
    @given(st.lists(STARTS | ABORTS | st.builds(MoveRequest, NAMES, SMALL), min_size=1, max_size=4))
    def fuzz(messages: list[Any]) -> None:
        runner.run(say(messages))

    fuzz()
    serves_on(runner, cluster, "after-router")


def test_any_words_of_a_decode_worker_harm_nobody_else(
    pools: tuple[asyncio.Runner, PoolCluster],
) -> None:
    runner, cluster = pools
    serves_on(runner, cluster, "before")
    machine = cluster.decode_machine
    region = RegionDescriptor(
        worker_id=WorkerId("stranger"),
        boot=Boot("s"),
        generation=0,
        address=0,
        num_bytes=machine.region.num_bytes,
        block_bytes=machine.record.block_bytes,
        layout=machine.record.layout,
        metadata=b"",
    )
    regions = st.builds(
        lambda layout, size, block: replace(
            region, layout=layout or region.layout, num_bytes=size, block_bytes=block
        ),
        st.sampled_from(["", "", "version=1", "?"]),
        st.sampled_from([region.num_bytes, 0, 1]),
        st.sampled_from([region.block_bytes, region.block_bytes, 0, 1]),
    )
    asks = st.builds(
        PrefillAsk,
        handoff=HANDOFFS,
        request=REQUESTS,
        first_block=SMALL,
        blocks=st.lists(RUNS, max_size=3).map(tuple),
        region=regions,
        remaining_s=st.sampled_from([0.0, 0.2, float("nan")]),
        verify=st.booleans(),
    )

    async def say(messages: list[Any]) -> None:
        stream = await cluster.connect(cluster.candidates[0], Listener())
        for message in messages:
            stream.send(message)
        await asyncio.sleep(0.01)
        stream.close("done")
        await asyncio.sleep(0.005)
        assert not cluster.prefill_machines[0].task.done(), messages

    @SETTINGS
    @given(st.lists(asks | st.builds(SettleHandoff, HANDOFFS), min_size=1, max_size=4))
    def fuzz(messages: list[Any]) -> None:
        runner.run(say(messages))

    fuzz()
    serves_on(runner, cluster, "after-decode")
