"""Mock workers for the router's benchmark: they speak the workers' protocol and compute nothing.

`python -m bench.router_workers ETCD`: one decode and one prefill worker of the default model in one
process, registered until it is ended; prints the decode worker's address. The first token of a
request leaves at once, the others on the grid of `bench.router_pace`, all tokens of a tick in one
message, as a decode worker's steps do.
A request's `priority` is its pace in microseconds: the one field that is of no use here otherwise,
and that every router hands on.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import uvloop

from bench.router_pace import next_tick
from control_plane.etcd.client import EtcdClient
from control_plane.registry import Registry
from control_plane.rpc.interface import Stream
from control_plane.rpc.server import RpcServer
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.ids import RequestId, WorkerId, new_boot
from core.lifetime import PrefillDecision, RequestTrace
from core.messages import AbortRequest, PathReport, RouterToWorker, StartRequest, TokenBatch
from core.messages import WorkerLoad as Load
from core.request import FinishReason, TokenUpdate
from core.worker_record import Hello, Role, WorkerRecord
from deploy.model_path import resolve_model
from engine.models.read_spec import read_spec

MODEL = "mock"
MICROSECOND = 1e-6

_TOKEN = 1000
"""Any whole word of the vocabulary."""

_clock = SystemClock()


class _Job:
    """One running request."""

    __slots__ = ("dispatch", "max_tokens", "num_tokens", "request_id", "stream")

    def __init__(self, stream: Stream[Any], start: StartRequest) -> None:
        self.stream = stream
        self.request_id = start.request.request_id
        self.dispatch = start.dispatch
        self.max_tokens = start.request.sampling.max_tokens
        self.num_tokens = 0

    def step(self) -> TokenUpdate:
        """Return the next token."""
        at = self.num_tokens
        self.num_tokens += 1
        ends = self.num_tokens == self.max_tokens
        reason = FinishReason.LENGTH if ends else None
        return TokenUpdate(self.request_id, 0, self.dispatch, at, (_TOKEN,), finish_reason=reason)

    def path(self) -> PathReport:
        """Return what goes out ahead of the last token."""
        trace = RequestTrace("decode-0", PrefillDecision.DISAGGREGATED, "prefill-0")
        return PathReport(self.request_id, self.dispatch, trace)


class MockWorker:
    """A `StreamListener[RouterToWorker]`; `run` must be running."""

    def __init__(self) -> None:
        self._new: list[_Job] = []
        self._jobs: dict[RequestId, _Job] = {}
        self._pace_s = 0.0
        self._arrived = asyncio.Event()

    def on_open(self, stream: Stream[Any]) -> None:
        """A router is there."""
        stream.send(Load(blocks_total=1 << 20, blocks_free=1 << 20))

    def on_message(self, stream: Stream[Any], message: RouterToWorker) -> None:
        """Take a request, or drop one."""
        if isinstance(message, AbortRequest):
            self._jobs.pop(message.request_id, None)
        if not isinstance(message, StartRequest):
            return
        job = _Job(stream, message)
        if job.max_tokens > 1:
            self._jobs[job.request_id] = job
            self._pace_s = message.request.priority * MICROSECOND
            self._arrived.set()
        if not self._new:
            asyncio.get_running_loop().call_soon(self._answer_new)
        self._new.append(job)

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        """Nothing to do."""

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        """Its requests end."""
        del reason
        self._jobs = {name: job for name, job in self._jobs.items() if job.stream is not stream}

    async def run(self) -> None:
        """Step for as long as there are requests that go on."""
        while True:
            self._arrived.clear()
            while self._jobs:
                await next_tick(self._pace_s, _clock)
                self._step([job for job in self._jobs.values() if job.num_tokens])
            await self._arrived.wait()

    def _answer_new(self) -> None:
        new, self._new = self._new, []
        self._step(new)

    def _step(self, jobs: list[_Job]) -> None:
        updates: dict[Stream[Any], list[TokenUpdate]] = {}
        for job in jobs:
            update = job.step()
            if update.finish_reason is not None:
                self._jobs.pop(job.request_id, None)
                job.stream.send(job.path())
            updates.setdefault(job.stream, []).append(update)
        for stream, its in updates.items():
            stream.send(TokenBatch(tuple(its)))


async def _serve(etcd: str) -> None:
    config = ControlPlaneConfig(etcd=etcd)
    client = EtcdClient(config, clock=_clock)
    await client.connect()
    registry = Registry(client, config.cluster, _clock)
    fingerprint = read_spec(resolve_model("")).fingerprint
    async with asyncio.TaskGroup() as group:
        for role in (Role.PREFILL, Role.DECODE):
            worker = MockWorker()
            group.create_task(worker.run())
            record = await _listen(worker, role, fingerprint, config)
            await registry.register(record).wait_registered()
        sys.stdout.write(f"{record.address}\n")
        sys.stdout.flush()


async def _listen(
    worker: MockWorker, role: Role, fingerprint: str, config: ControlPlaneConfig
) -> WorkerRecord:
    name, boot = WorkerId(f"{role.value}-0"), new_boot()
    hello = Hello("worker", name, boot, cluster=config.cluster, model_fingerprint=fingerprint)
    server = RpcServer(lambda: hello, config=config, clock=_clock)
    server.listen("router", worker)
    port = await server.start("127.0.0.1", 0)
    return WorkerRecord(
        worker_id=name,
        boot=boot,
        registration=0,
        role=role,
        address=f"127.0.0.1:{port}",
        metrics_address="",
        model=MODEL,
        model_fingerprint=fingerprint,
        layout="mock",
        numerics="mock",
        block_size=16,
        block_bytes=1 << 14,
        num_blocks=1 << 20,
        max_model_len=8192,
        fabric="none",
        transport="none",
        pid=os.getpid(),
    )


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
