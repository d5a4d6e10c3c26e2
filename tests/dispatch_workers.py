"""Workers that speak the routers' protocol and compute nothing, in memory or behind real gRPC.

In memory a stream can be frozen and cut at will.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from control_plane.rpc import client
from control_plane.rpc.interface import Stream, StreamListener
from control_plane.rpc.server import RpcServer
from core.clock import Clock, SystemClock
from core.config import Config, ControlPlaneConfig
from core.errors import PeerUnavailable
from core.ids import RequestId, WorkerId, new_boot
from core.lifetime import PrefillDecision, RequestTrace
from core.messages import (
    AbortRequest,
    MoveRequest,
    PathReport,
    PromptScored,
    RequestRefused,
    RouterToWorker,
    StartRequest,
    TokenBatch,
    WorkerOrder,
    WorkerToRouter,
)
from core.request import FinishReason, PromptLogprobs, TokenUpdate
from core.worker_record import Hello, Role, WorkerRecord

FINGERPRINT = "ab" * 16

CONFIG = Config(control_plane=ControlPlaneConfig(heartbeat_s=0.05, suspect_s=0.2))


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
        self.told: list[MoveRequest | WorkerOrder] = []
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

    def on_message(self, stream: Stream[Any], message: RouterToWorker | WorkerOrder) -> None:
        if isinstance(message, AbortRequest):
            self.aborted.append(message)
            job = self.jobs.get(message.request_id)
            if job is not None and job[0].dispatch == message.dispatch:
                if message.sample_index is None:
                    del self.jobs[message.request_id]
                else:
                    job[1].pop(message.sample_index, None)
        elif isinstance(message, StartRequest):
            self.start(message)
        else:
            self.told.append(message)
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
                path = PrefillDecision.DISAGGREGATED if candidate else PrefillDecision.LOCAL
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

    def score(self, request_id: RequestId, logprobs: PromptLogprobs) -> None:
        """Tell a part of a running request's prompt log-probabilities."""
        start, _ = self.jobs[request_id]
        self.say(PromptScored(request_id, start.dispatch, logprobs))

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
