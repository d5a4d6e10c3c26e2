"""The dispatcher with workers that speak the protocol and compute nothing.

The same workers are reached in memory, where a stream can be frozen and cut at will, and through
the real gRPC streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from control_plane.registry import WorkerSeen, WorkerSuspect
from control_plane.rpc import client
from control_plane.rpc.interface import Stream, StreamListener
from control_plane.rpc.server import RpcServer
from core.block_hash import hash_blocks
from core.clock import Clock, SystemClock
from core.config import Config, ControlPlaneConfig, DisaggregationConfig
from core.errors import PeerUnavailable, RequestError
from core.ids import Boot, RequestId, WorkerId, new_boot
from core.lifetime import Lifetime, RequestTrace, Stamp
from core.messages import (
    AbortRequest,
    PathReport,
    RequestFailed,
    RequestRefused,
    RouterToWorker,
    StartRequest,
    TokenBatch,
    WorkerLoad,
    WorkerToRouter,
)
from core.request import EngineRequest, FinishReason, TokenUpdate
from core.sampling_params import SamplingParams
from core.worker_record import Hello, Role, WorkerRecord
from router.dispatch.dispatcher import RouterDispatcher
from router.dispatch.interface import Disaggregate, GenerateRequest
from router.dispatch.request_state import RetryRules
from router.dispatch.token_stream import RequestStream
from router.dispatch.worker_link import WorkerLink

pytestmark = pytest.mark.anyio

FINGERPRINT = "ab" * 16
CONFIG = Config(control_plane=ControlPlaneConfig(heartbeat_s=0.05, suspect_s=0.2))
RULES = RetryRules(
    first_wait_s=0.01,
    max_wait_s=0.05,
    refused_patience_s=0.2,
    lost_patience_s=0.5,
    suspect_grace_s=0.05,
    silence_s=0.1,
)


def token(prompt: tuple[int, ...], sample: int, index: int) -> int:
    """What every worker computes, wherever and however late."""
    return (sum(prompt) * 31 + sample * 7 + index * 13) % 50_000


class News:
    """Waits for conditions; looked at again whenever something happened anywhere."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def happened(self) -> None:
        self._event.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._event.clear()
                await self._event.wait()


class WatchedDispatcher(RouterDispatcher):
    """Tells the tests when something happened."""

    news: News

    def link_opened(self, link: WorkerLink) -> None:
        super().link_opened(link)
        self.news.happened()

    def link_message(self, link: WorkerLink, message: WorkerToRouter) -> None:
        super().link_message(link, message)
        self.news.happened()


class FakeWorker:
    """A decode, prefill or colocated worker: a token of every sample a step, when told to step."""

    def __init__(self, name: str, role: Role, news: News) -> None:
        self.boot = new_boot()
        self.name, self.role = WorkerId(name), role
        self.address = f"memory:{name}"
        self.is_listening = True
        self.started: list[StartRequest] = []
        self.aborted: list[AbortRequest] = []
        self.jobs: dict[RequestId, tuple[StartRequest, dict[int, int]]] = {}
        self.refusal: str | None = None
        self.stream: Stream[Any] | None = None
        self.is_mute = False
        self.news = news

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.name,
            boot=self.boot,
            registration=1,
            role=self.role,
            address=self.address,
            metrics_address="",
            model="model",
            model_fingerprint=FINGERPRINT,
            layout="layout",
            numerics="numerics",
            block_size=16,
            block_bytes=1024,
            num_blocks=1000,
            max_model_len=4096,
            fabric="inprocess",
            transport="inprocess",
            pid=1,
        )

    def hello(self) -> Hello:
        return Hello("worker", self.name, self.boot, model_fingerprint=FINGERPRINT)

    # -- StreamListener --

    def on_open(self, stream: Stream[Any]) -> None:
        self.stream = stream
        self.news.happened()

    def on_message(self, stream: Stream[Any], message: RouterToWorker) -> None:
        if isinstance(message, AbortRequest):
            self.aborted.append(message)
            job = self.jobs.get(message.request_id)
            if job is not None and job[0].dispatch == message.dispatch:
                if message.sample_index is None:
                    del self.jobs[message.request_id]
                else:
                    job[1].pop(message.sample_index, None)
        else:
            self.start(message)
        self.news.happened()

    def start(self, message: StartRequest) -> None:
        self.started.append(message)
        request_id = message.request.request_id
        if self.refusal is not None:
            self.say(RequestRefused(request_id, message.dispatch, self.refusal, "says the test"))
            return
        outputs = message.request.outputs or ((),) * message.request.sampling.n
        self.jobs[request_id] = (message, {i: len(done) for i, done in enumerate(outputs)})

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        pass

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        if stream is self.stream:
            self.stream = None
            self.jobs.clear()
            self.news.happened()

    # -- what tests make it do --

    def say(self, message: WorkerToRouter) -> None:
        assert self.stream is not None
        self.stream.send(message)

    def step(self) -> None:
        """Make a token of every running sample, all in one batch."""
        updates: list[TokenUpdate] = []
        for request_id, (start, done) in list(self.jobs.items()):
            request = start.request
            if not any(request.outputs) and not any(done.values()):
                candidate = start.candidates[0].worker_id if start.candidates else None
                path = "disaggregated" if candidate else "local"
                trace = RequestTrace(self.name, path, candidate, cached_tokens=start.dispatch)
                self.say(PathReport(request_id, start.dispatch, trace))
            for sample, index in list(done.items()):
                is_last = index + 1 == request.sampling.max_tokens
                updates.append(
                    TokenUpdate(
                        request_id,
                        sample,
                        start.dispatch,
                        index,
                        (token(request.prompt, sample, index),),
                        finish_reason=FinishReason.LENGTH if is_last else None,
                    )
                )
                done[sample] += 1
                if is_last:
                    del done[sample]
            if not done:
                del self.jobs[request_id]
        self.say(TokenBatch(tuple(updates)))

    async def serve(self) -> None:
        """Step for ever; heartbeats carry the load."""
        while True:
            await asyncio.sleep(0.001)
            if self.stream is not None and not self.is_mute and self.jobs:
                self.step()


class MemoryStream:
    """One end of a stream; what is sent arrives with the next loop tick, unless frozen."""

    def __init__(self, listener: StreamListener[Any], peer: Hello) -> None:
        self.listener, self.peer = listener, peer
        self.other: MemoryStream = self
        self.is_suspect = False
        self.is_open = True

    def send(self, message: Any) -> None:
        if self.is_open:
            asyncio.get_running_loop().call_soon(self.other.receive, message)

    def receive(self, message: Any) -> None:
        if self.is_open:
            self.listener.on_message(self, message)

    def close(self, reason: str = "") -> None:
        for end in (self, self.other):
            if end.is_open:
                end.is_open = False
                asyncio.get_running_loop().call_soon(end.listener.on_closed, end, reason)

    def suspect(self, suspect: bool) -> None:
        self.is_suspect = suspect
        self.listener.on_suspect(self, suspect=suspect)


class MemoryNetwork:
    """Connects a router to workers by address."""

    def __init__(self) -> None:
        self.news = News()
        self.workers: dict[str, FakeWorker] = {}
        self.router_ends: dict[str, MemoryStream] = {}
        self.num_refused = 0

    async def add(self, name: str, role: Role) -> FakeWorker:
        worker = FakeWorker(name, role, self.news)
        self.workers[worker.address] = worker
        return worker

    async def connect(
        self,
        address: str,
        hello: Hello,
        listener: StreamListener[Any],
        *,
        config: ControlPlaneConfig,
        clock: Clock,
    ) -> Stream[Any]:
        await asyncio.sleep(0)
        worker = self.workers[address]
        if not worker.is_listening or hello.expected_boot != worker.boot:
            self.num_refused += 1
            self.news.happened()
            msg = f"{address} does not answer"
            raise PeerUnavailable(msg)
        near, far = MemoryStream(listener, worker.hello()), MemoryStream(worker, hello)
        near.other, far.other = far, near
        self.router_ends[worker.name] = near
        worker.on_open(far)
        listener.on_open(near)
        return near

    async def stop(self) -> None:
        """Nothing runs here."""


class GrpcNetwork:
    """The real thing, on loopback."""

    def __init__(self) -> None:
        self.news = News()
        self._servers: list[RpcServer] = []
        self.connect = client.connect

    async def add(self, name: str, role: Role) -> FakeWorker:
        worker = FakeWorker(name, role, self.news)
        server = RpcServer(worker.hello, config=CONFIG.control_plane, clock=SystemClock())
        server.listen("router", worker)
        self._servers.append(server)
        worker.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        return worker

    async def stop(self) -> None:
        for server in self._servers:
            await server.stop(0.1)


class Cluster:
    """A dispatcher and its workers."""

    def __init__(self, network: Any, config: Config = CONFIG) -> None:
        self.network = network
        self.workers: list[FakeWorker] = []
        self.dispatcher = WatchedDispatcher(
            config,
            hello=Hello("router", "router", new_boot(), model_fingerprint=FINGERPRINT),
            connect=network.connect,
            clock=SystemClock(),
            rng=random.Random(7),
            rules=RULES,
        )
        self.news: News = network.news
        self.dispatcher.news = self.news

    async def until(self, condition: Callable[[], bool]) -> None:
        await self.news.until(condition)

    async def add(self, name: str, role: Role) -> FakeWorker:
        worker = await self.network.add(name, role)
        self.workers.append(worker)
        self.register()
        await self.until(
            lambda: any(w["id"] == name and w["state"] == "live" for w in self.status())
        )
        await self.until(lambda: worker.stream is not None)
        return worker

    def register(self) -> None:
        for worker in self.workers:
            self.dispatcher.on_worker_change(WorkerSeen(worker.record()))

    def unregister(self) -> None:
        for worker in self.workers:
            self.dispatcher.on_worker_change(WorkerSuspect(worker.name, worker.boot))

    def status(self) -> list[dict[str, Any]]:
        found: Any = self.dispatcher.cluster_status()["workers"]
        return found

    def start(self, request_id: str, *prompt: int, **changes: Any) -> RequestStream:
        sampling = SamplingParams(
            n=changes.pop("n", 1), max_tokens=changes.pop("max_tokens", 5), seed=1
        )
        request = EngineRequest(RequestId(request_id), prompt or tuple(range(100)), sampling)
        generate = GenerateRequest(request, timeout_s=5.0)
        return self.dispatcher.start(msgspec.structs.replace(generate, **changes), Lifetime())

    async def until_one_has(self, request_id: str, besides: FakeWorker | None = None) -> None:
        await self.until(
            lambda: any(request_id in w.jobs for w in self.workers if w is not besides)
        )

    def find(self, request_id: str, besides: FakeWorker | None = None) -> FakeWorker:
        """Return the worker that has a request."""
        return next(w for w in self.workers if request_id in w.jobs and w is not besides)


@contextlib.asynccontextmanager
async def running(network: Any, config: Config = CONFIG) -> AsyncGenerator[Cluster]:
    cluster = Cluster(network, config)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        run = group.create_task(cluster.dispatcher.run())
        try:
            yield cluster
            assert cluster.dispatcher.num_requests() == 0, "nothing is left in flight"
        finally:
            await cluster.dispatcher.stop()
            await run
            await network.stop()


@pytest.fixture
async def cluster() -> AsyncGenerator[Cluster]:
    async with running(MemoryNetwork()) as found:
        yield found


async def read(stream: RequestStream, num_samples: int = 1) -> list[list[int]]:
    """Read to the end; every update must go on where the last ended."""
    outputs: list[list[int]] = [[] for _ in range(num_samples)]
    async for updates in stream:
        for update in updates:
            assert update.start_index == len(outputs[update.sample_index])
            outputs[update.sample_index].extend(update.token_ids)
    return outputs


def expected(num_tokens: int, sample: int = 0) -> list[int]:
    return [token(tuple(range(100)), sample, index) for index in range(num_tokens)]


async def settle() -> None:
    """Let what was sent in memory arrive and be answered."""
    for _ in range(10):
        await asyncio.sleep(0)


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


async def test_without_a_worker_a_request_is_refused_at_once(cluster: Cluster) -> None:
    with pytest.raises(RequestError) as refused:
        cluster.start("r")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5.0)
    worker = await cluster.add("d0", Role.DECODE)
    with pytest.raises(RequestError) as always:
        cluster.start("r", disaggregate=Disaggregate.ALWAYS)
    assert always.value.code == "no_prefill_worker"
    assert cluster.dispatcher.num_requests() == 0
    assert worker.started == []


async def test_strict_mode_needs_a_prefill_worker() -> None:
    strict = msgspec.structs.replace(CONFIG, disaggregation=DisaggregationConfig("strict"))
    async with running(MemoryNetwork(), strict) as cluster:
        decode = await cluster.add("d0", Role.DECODE)
        assert not cluster.dispatcher.is_ready()
        with pytest.raises(RequestError) as refused:
            cluster.start("r")
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


async def test_an_id_in_use_is_refused_and_free_afterwards(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    stream = cluster.start("r")
    with pytest.raises(RequestError) as duplicate:
        cluster.start("r")
    assert duplicate.value.status == 400
    await settle()
    worker.step()
    stream.abort()
    again = cluster.start("r")  # tokens of the first are still on their way
    await settle()
    assert worker.aborted == [AbortRequest(RequestId("r"), 1)]
    assert worker.started[-1].dispatch == 2
    for _ in range(5):
        worker.step()
    assert await read(again) == [expected(5)]


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
    assert worker.aborted[1:] == [AbortRequest(RequestId("r"), 1)]


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


async def test_a_burst_between_two_loads_is_spread(cluster: Cluster) -> None:
    for name in ("p0", "p1", "d0", "d1"):
        await cluster.add(name, Role.PREFILL if name[0] == "p" else Role.DECODE)
    streams = [cluster.start(f"r{i}", max_tokens=1) for i in range(40)]
    await settle()
    decodes = [worker for worker in cluster.workers if worker.role is Role.DECODE]
    assert all(12 <= len(worker.started) <= 28 for worker in decodes)
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
    assert (shown["state"], shown["role"], shown["boot"]) == ("live", "decode", worker.boot)
    assert msgspec.json.encode(cluster.dispatcher.cluster_status())


async def test_a_stranger_is_told_once_to_stop(cluster: Cluster) -> None:
    worker = await cluster.add("d0", Role.DECODE)
    for index in range(3):
        worker.say(TokenBatch((TokenUpdate(RequestId("ghost"), 0, 4, index, (1,)),)))
    worker.say(RequestFailed(RequestId("ghost"), 4, "x", retriable=True))
    worker.say(RequestRefused(RequestId("ghost"), 4, "draining", "x"))
    worker.say(PathReport(RequestId("ghost"), 4, RequestTrace("d0", "local")))
    await settle()
    assert worker.aborted == [AbortRequest(RequestId("ghost"), 4)]


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
