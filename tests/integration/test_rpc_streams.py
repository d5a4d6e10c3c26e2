"""Streams over real gRPC: handshake, order, batching, ends, silence, kill and freeze."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from msgspec.structs import replace

from control_plane.rpc import codec, stream_end
from control_plane.rpc.client import connect
from control_plane.rpc.grpc_wire import (
    ClientWire,
    ServerContext,
    new_channel,
    new_server,
    open_call,
)
from control_plane.rpc.interface import Stream
from control_plane.rpc.peer_watch import PeerWatch
from control_plane.rpc.refusals import PeersRefused
from control_plane.rpc.server import RpcServer
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.environment import child_environment
from core.errors import PeerUnavailable, ProtocolMismatch, UsageError
from core.ids import Boot, RequestId
from core.messages import AbortRequest, RequestFailed, StartRequest
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core.worker_record import Hello

pytestmark = pytest.mark.anyio

CONFIG = ControlPlaneConfig(heartbeat_s=0.1, suspect_s=0.4)
WORKER = Hello(kind="worker", name="decode-0", boot=Boot("b1"), model_fingerprint="m", layout="l")
ROUTER = Hello(kind="router", name="router-0", boot=Boot("r1"), model_fingerprint="m")
CLOCK = SystemClock()


class Recorder:
    """Puts all callbacks into a queue; answers each abort with what `answer` returns."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.streams: list[Stream[Any]] = []

    def on_open(self, stream: Stream[Any]) -> None:
        self.streams.append(stream)
        self.events.put_nowait(("open", stream.peer))

    def on_message(self, stream: Stream[Any], message: Any) -> None:
        self.events.put_nowait(("message", message))

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        self.events.put_nowait(("suspect", suspect))

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        self.events.put_nowait(("closed", reason))

    async def next(self, kind: str, within_s: float = 5.0) -> Any:
        async with asyncio.timeout(within_s):
            got, value = await self.events.get()
        assert got == kind, (got, value)
        return value


@asynccontextmanager
async def serving(
    hello: Hello = WORKER, refused: PeersRefused | None = None
) -> AsyncGenerator[tuple[str, Recorder]]:
    server = RpcServer(lambda: hello, config=CONFIG, clock=CLOCK, refused=refused)
    recorder = Recorder()
    server.listen("router", recorder)
    server.listen("decode", recorder)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}", recorder
    finally:
        await server.stop(10.0)  # streams that are closed end it at once


def abort(index: int) -> AbortRequest:
    return AbortRequest(RequestId(f"r{index}"), 1)


async def test_messages_arrive_in_order_and_both_ways() -> None:
    async with serving() as (address, worker):
        router = Recorder()
        stream = await connect(address, ROUTER, router, config=CONFIG, clock=CLOCK)
        assert await router.next("open") == WORKER
        assert await worker.next("open") == ROUTER
        for index in range(1000):
            stream.send(abort(index))
        assert [await worker.next("message") for _ in range(1000)] == [
            abort(i) for i in range(1000)
        ]
        failed = RequestFailed(RequestId("r"), 1, "käputt", retriable=True)
        worker.streams[0].send(failed)
        assert await router.next("message") == failed
        stream.close("done")
        assert await worker.next("closed") == "closed by router-0: done"
        assert await router.next("closed") == "done"
        stream.send(abort(0))  # dropped, not raised
        stream.close("again")
        assert router.events.empty()


async def test_a_prompt_of_128k_tokens_passes() -> None:
    async with serving() as (address, worker):
        stream = await connect(address, ROUTER, Recorder(), config=CONFIG, clock=CLOCK)
        await worker.next("open")
        request = EngineRequest(RequestId("r"), tuple(range(131072)), SamplingParams())
        start = StartRequest(request, 1, (), 5.0)
        for _ in range(8):
            stream.send(start)
        for _ in range(8):
            assert await worker.next("message") == start
        stream.close()


async def test_what_was_sent_before_close_arrives() -> None:
    async with serving() as (address, worker):
        stream = await connect(address, ROUTER, Recorder(), config=CONFIG, clock=CLOCK)
        await worker.next("open")
        stream.send(abort(1))
        stream.close("bye")
        assert await worker.next("message") == abort(1)
        assert await worker.next("closed") == "closed by router-0: bye"


async def test_a_server_that_stops_tells_so_and_frees_its_port() -> None:
    router = Recorder()
    async with serving() as (address, _):
        await connect(address, ROUTER, router, config=CONFIG, clock=CLOCK)
        await router.next("open")
    assert await router.next("closed") == "closed by decode-0: the worker stops"
    with pytest.raises(PeerUnavailable, match=address):
        await connect(address, ROUTER, router, config=CONFIG, clock=CLOCK)


@pytest.mark.parametrize(
    ("opener", "says"),
    [
        (Hello("router", "r", Boot("x"), protocol=99), "protocol: the opener has 99"),
        (Hello("router", "r", Boot("x"), cluster="other"), "cluster: the opener has 'other'"),
        (Hello("router", "r", Boot("x"), expected_boot="b0"), "boot: expected 'b0'"),
        (Hello("router", "r", Boot("x"), model_fingerprint="n"), "model_fingerprint: .* 'n'"),
        (Hello("decode", "d", Boot("x"), layout="k"), "layout: the opener has 'k'"),
        (
            Hello("decode", "d", Boot("x"), layout="block_size=8"),
            "layout.block_size: the opener has '8', the worker '16'",
        ),
        (Hello("planner", "p", Boot("x")), "kind: 'planner' is not served"),
    ],
)
async def test_a_mismatch_is_refused_by_name_and_counted_at_both_ends(
    opener: Hello, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    counts = PeersRefused(), PeersRefused()
    served = replace(WORKER, layout="block_size=16") if "block_size" in says else WORKER
    async with serving(served, counts[0]) as (address, worker):
        with pytest.raises(ProtocolMismatch, match=says):
            await connect(
                address, opener, Recorder(), config=CONFIG, clock=CLOCK, refused=counts[1]
            )
        assert worker.events.empty()
    for count in counts:
        assert refusals_of(count) == {says.partition(":")[0]: 1}
    refusals = [record for record in caplog.records if "refused a stream" in record.message]
    assert len(refusals) == 1


def refusals_of(count: PeersRefused) -> dict[str, float]:
    (family,) = count.collect()
    return {sample.labels["reason"]: sample.value for sample in family.samples}


async def test_an_opener_warns_once_of_each_refusal(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (address, _):
        for cluster in ("one", "one", "two", "one", "two"):
            opener = Hello("router", "r", Boot("x"), cluster=cluster)
            with pytest.raises(ProtocolMismatch, match=cluster):
                await connect(address, opener, Recorder(), config=CONFIG, clock=CLOCK)
    told = [r for r in caplog.records if r.name == "control_plane.rpc.client"]
    warned = [r.getMessage() for r in told if r.levelname == "WARNING"]
    assert len(warned) == 2
    assert "cluster: the opener has 'one'" in warned[0]
    assert "cluster: the opener has 'two'" in warned[1]


async def test_a_queue_over_its_bound_closes_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_end, "MAX_QUEUED_BYTES", 1000)
    async with serving() as (address, worker):
        router = Recorder()
        stream = await connect(address, ROUTER, router, config=CONFIG, clock=CLOCK)
        await router.next("open")
        for index in range(1000):
            stream.send(abort(index))
        assert "reads too slowly" in await router.next("closed")
        await worker.next("open")
        await worker.next("closed")


@pytest.mark.parametrize("says_goodbye", [False, True])
async def test_an_opener_that_cancels_is_seen_whenever_it_does(*, says_goodbye: bool) -> None:
    """gRPC then cancels the worker's task, also while it ends for another reason."""
    async with serving() as (address, worker):
        for _ in range(10):
            channel = new_channel(address)
            call = open_call(channel)
            wire = ClientWire(call)
            await wire.write(codec.encode_hello(ROUTER))
            await wire.read()
            await worker.next("open")
            if says_goodbye:
                await wire.write(codec.encode_closing("bye"))
            call.cancel()
            await worker.next("closed", within_s=CONFIG.suspect_s)
            await channel.close(None)


async def raw_stream(address: str, *frames: bytes) -> tuple[ClientWire, grpc.aio.Channel]:
    channel = new_channel(address)
    wire = ClientWire(open_call(channel))
    for frame in frames:
        await wire.write(frame)
    return wire, channel


async def test_whoever_says_no_hello_is_sent_away() -> None:
    count = PeersRefused()
    async with serving(refused=count) as (address, worker):
        wire, channel = await raw_stream(address, codec.HEARTBEAT)
        with pytest.raises(ConnectionError, match="no hello"):
            await wire.read()
        assert worker.events.empty()
        assert refusals_of(count) == {"no_hello": 1}
        await channel.close(None)


UNKNOWN_KIND = bytes([0x12, 0x03, 0xFA, 0x7F, 0x00])
NO_FRAME = b"\xff"


@pytest.mark.parametrize("frame", [UNKNOWN_KIND, NO_FRAME])
async def test_an_unreadable_frame_ends_the_stream(
    frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Both sides hear why, and nobody's log has a traceback."""
    async with serving() as (address, worker):
        wire, channel = await raw_stream(address, codec.encode_hello(ROUTER), frame)
        await worker.next("open")
        assert "unreadable frame from router-0" in await worker.next("closed")
        goodbye = ""
        while (said := await wire.read()) is not None:
            goodbye = said.closing
        assert "unreadable frame from router-0" in goodbye
        await channel.close(None)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("frame", [UNKNOWN_KIND, NO_FRAME])
async def test_so_it_does_at_the_opener_s_end(
    frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def worker(_: object, context: ServerContext) -> None:
        await context.read()
        await context.write(codec.encode_hello(WORKER))
        await context.write(frame)
        await context.read()

    server, router = new_server(worker), Recorder()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await connect(f"127.0.0.1:{port}", ROUTER, router, config=CONFIG, clock=CLOCK)
    await router.next("open")
    assert "unreadable frame from decode-0" in await router.next("closed")
    await server.stop(5.0)
    assert "Traceback" not in caplog.text


async def test_a_port_in_use_is_said_in_one_line() -> None:
    async with serving() as (address, _):
        port = int(address.rpartition(":")[2])
        second = RpcServer(lambda: WORKER, config=CONFIG, clock=CLOCK)
        with pytest.raises(UsageError, match=f"cannot listen on {address}: in use"):
            await second.start("127.0.0.1", port)


class Failing(Recorder):
    """Has a bug."""

    def on_message(self, stream: Stream[Any], message: Any) -> None:
        raise ZeroDivisionError


async def test_a_listeners_bug_is_logged_and_ends_its_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as (address, worker):
        router = Failing()
        await connect(address, ROUTER, router, config=CONFIG, clock=CLOCK)
        await router.next("open")
        await worker.next("open")
        worker.streams[0].send(RequestFailed(RequestId("r"), 1, "", retriable=True))
        assert await router.next("closed") == "failed here: ZeroDivisionError()"
        await worker.next("closed")
    assert [r.message for r in caplog.records] == ["stream to decode-0: its listener failed"]


PEER = """
import asyncio, sys
from control_plane.rpc.server import RpcServer
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.worker_record import Hello

class Ignore:
    def on_open(self, stream): pass
    def on_message(self, stream, message): pass
    def on_suspect(self, stream, *, suspect): pass
    def on_closed(self, stream, reason): pass

async def main():
    config = ControlPlaneConfig(heartbeat_s=0.1, suspect_s=0.4)
    hello = Hello(kind="worker", name="decode-0", boot="b1")
    server = RpcServer(lambda: hello, config=config, clock=SystemClock())
    server.listen("router", Ignore())
    print(await server.start("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def peer_process() -> AsyncGenerator[tuple[str, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PEER,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=child_environment(),
    )
    try:
        assert process.stdout is not None
        port = (await process.stdout.readline()).decode().strip()
        yield f"127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_peer_closes_the_stream_at_once() -> None:
    async with peer_process() as (address, process):
        router = Recorder()
        await connect(address, ROUTER, router, config=CONFIG, clock=CLOCK)
        await router.next("open")
        process.kill()
        assert "lost decode-0" in await router.next("closed", within_s=CONFIG.suspect_s)


async def test_an_idle_stream_is_trusted_by_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: Counter[PeerWatch] = Counter()
    hear = PeerWatch.heard
    both_heard = asyncio.Event()

    def counted(watch: PeerWatch, now: float) -> bool:
        heard[watch] += 1
        if len(heard) == 2 and min(heard.values()) >= 5:
            both_heard.set()
        return hear(watch, now)

    monkeypatch.setattr(PeerWatch, "heard", counted)
    async with serving() as (address, worker):
        router = Recorder()
        stream = await connect(address, ROUTER, router, config=CONFIG, clock=CLOCK)
        async with asyncio.timeout(10.0):
            await both_heard.wait()
        assert abs(heard.total() - 2 * max(heard.values())) <= 2, "an answer for each heartbeat"
        stream.close("done")
        assert [(await end.next("open"), await end.next("closed"))[1] for end in (router, worker)]


async def test_a_frozen_peer_is_suspect_and_comes_back() -> None:
    async with peer_process() as (address, process):
        router = Recorder()
        stream = await connect(address, ROUTER, router, config=CONFIG, clock=CLOCK)
        await router.next("open")
        os.kill(process.pid, signal.SIGSTOP)
        assert await router.next("suspect", within_s=1.5) is True
        assert stream.is_suspect
        os.kill(process.pid, signal.SIGCONT)
        assert await router.next("suspect", within_s=1.5) is False
        assert not stream.is_suspect
        os.kill(process.pid, signal.SIGSTOP)
        assert await router.next("suspect", within_s=1.5) is True
        stream.close("gave up")
        assert await router.next("closed", within_s=2.5) == "gave up"


async def test_a_frozen_peer_does_not_hang_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.rpc.client.CONNECT_S", 0.3)
    async with peer_process() as (address, process):
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(PeerUnavailable, match="did not answer the handshake"):
            await connect(address, ROUTER, Recorder(), config=CONFIG, clock=CLOCK)
