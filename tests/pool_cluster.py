"""Real prefill and decode workers in one process: mock executors, the in-process fabric, streams
joined in memory, and a router's end that checks every token stream for gaps and repetitions."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from core.clock import SystemClock
from core.config import Config, ControlPlaneConfig, EngineConfig, KvTransferConfig
from core.errors import PeerUnavailable
from core.ids import RequestId, WorkerId, new_boot
from core.lifetime import RequestTrace
from core.messages import (
    AbortRequest,
    PathReport,
    PrefillCandidate,
    PromptScored,
    RequestFailed,
    RequestRefused,
    StartRequest,
    TokenBatch,
    WorkerLoad,
)
from core.request import EngineRequest, FinishReason, PromptLogprobs, TokenLogprobs
from core.sampling_params import SamplingParams
from core.worker_record import Hello, Role, WorkerRecord
from decode_pool.ports import DecodePorts
from decode_pool.worker import DecodeWorker
from engine.engine import Engine, settings_for
from engine.engine_thread import EngineThread
from engine.events import EngineStats, Event
from engine.executor.mock_executor import MockExecutor
from engine.executor.mock_pool import mock_layout
from engine.executor.mock_tokens import expected_tokens
from kv_transfer.inprocess.model import FabricEvent, Faults, Kind
from kv_transfer.inprocess.transport import InProcessFabric
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.region import HostRegion
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import Notification, PeerName, Transport
from prefill_pool.ports import PrefillPorts
from prefill_pool.worker import PrefillWorker

VOCAB = 997
EOS = 7
PATIENCE_S = 60.0


class MemoryStream:
    """One end of a stream; messages reach the other end on the next turn of the loop."""

    def __init__(self, peer: Hello, listener: Any) -> None:
        self.peer = peer
        self.listener = listener
        self.other: MemoryStream
        self.is_suspect = False
        self.is_closed = False
        self.is_frozen = False
        self._loop = asyncio.get_running_loop()

    def send(self, message: Any) -> None:
        if not self.is_closed:
            self._loop.call_soon(self.other.receive, message)

    def receive(self, message: Any) -> None:
        if not self.is_closed and not self.is_frozen:
            self.listener.on_message(self, message)

    def close(self, reason: str = "") -> None:
        for end in (self, self.other):
            if not end.is_closed:
                end.is_closed = True
                self._loop.call_soon(end.listener.on_closed, end, reason)


def join_streams(opener: Hello, opener_listener: Any, server: Hello, server_listener: Any):
    """Return the opener's end of a new stream."""
    here = MemoryStream(server, opener_listener)
    there = MemoryStream(opener, server_listener)
    here.other, there.other = there, here
    server_listener.on_open(there)
    opener_listener.on_open(here)
    return here


@dataclass
class Answer:
    """What a router heard of one dispatch."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    scores: list[PromptLogprobs] = field(default_factory=list)
    traces: list[RequestTrace] = field(default_factory=list)
    refused: RequestRefused | None = None
    failed: RequestFailed | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(
        self, condition: Callable[[Answer], bool], timeout_s: float = PATIENCE_S
    ) -> Answer:
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()
        return self


class RouterEnd:
    """A router: sends requests, checks that token streams are contiguous."""

    def __init__(self) -> None:
        self.answers: dict[tuple[RequestId, int], Answer] = defaultdict(Answer)
        self.loads: list[WorkerLoad] = []
        self.batch_sizes: list[int] = []
        self.stream: MemoryStream

    def on_open(self, stream: Any) -> None:
        self.stream = stream

    def on_suspect(self, stream: Any, *, suspect: bool) -> None: ...

    def on_closed(self, stream: Any, reason: str) -> None: ...

    def on_message(self, stream: Any, message: Any) -> None:
        if isinstance(message, WorkerLoad):
            self.loads.append(message)
            return
        if isinstance(message, TokenBatch):
            self.batch_sizes.append(len(message.updates))
            for update in message.updates:
                answer = self.answers[update.request_id, update.dispatch]
                tokens = answer.tokens[update.sample_index]
                assert update.sample_index not in answer.reasons, "a token after the last"
                assert update.start_index == len(tokens), "a gap or a repetition"
                tokens.extend(update.token_ids)
                answer.logprobs[update.sample_index].extend(update.logprobs)
                if update.finish_reason is not None:
                    assert answer.traces, "the path comes before the last update"
                    answer.reasons[update.sample_index] = update.finish_reason
                answer.changed.set()
            return
        answer = self.answers[message.request_id, message.dispatch]
        if isinstance(message, PathReport):
            answer.traces.append(message.trace)
        elif isinstance(message, PromptScored):
            end = answer.scores[-1].end if answer.scores else 1
            assert message.logprobs.start == end, "a gap or a repetition in the prompt's scores"
            assert not any(answer.tokens.values()), "a score after a token"
            answer.scores.append(message.logprobs)
        elif isinstance(message, RequestRefused):
            answer.refused = message
        elif isinstance(message, RequestFailed):
            answer.failed = message
        answer.changed.set()

    def start(
        self,
        request: EngineRequest,
        candidates: tuple[PrefillCandidate, ...] = (),
        *,
        dispatch: int = 1,
        remaining_s: float = 30.0,
        allow_local: bool = True,
    ) -> Answer:
        for index, outputs in enumerate(request.outputs):
            self.answers[request.request_id, dispatch].tokens[index].extend(outputs)
        self.stream.send(StartRequest(request, dispatch, candidates, remaining_s, allow_local))
        return self.answers[request.request_id, dispatch]

    def abort(self, request: EngineRequest, sample_index: int | None = None) -> None:
        self.stream.send(AbortRequest(request.request_id, 1, sample_index))


class Machine:
    """What a worker's process owns: region, engine thread, fabric thread."""

    def __init__(self, cluster: PoolCluster, name: str, role: Role, num_blocks: int) -> None:
        layout = mock_layout(cluster.config.engine.block_size)
        self.cluster = cluster
        self.num_blocks = num_blocks
        self.region = HostRegion(num_blocks * layout.block_bytes)
        self.record = WorkerRecord(
            worker_id=WorkerId(name),
            boot=new_boot(),
            registration=1,
            role=role,
            address=name,
            metrics_address="",
            model="mock",
            model_fingerprint=layout.model,
            layout=layout.summary(),
            numerics="mock",
            block_size=layout.block_size,
            block_bytes=layout.block_bytes,
            num_blocks=num_blocks,
            max_model_len=num_blocks * layout.block_size,
            fabric="inprocess",
            transport="inprocess",
            pid=0,
        )
        executor = MockExecutor(
            layout,
            self.region,
            num_blocks=num_blocks,
            vocab_size=VOCAB,
            config=cluster.config.engine,
        )
        settings = settings_for(
            executor,
            cluster.config.engine,
            max_model_len=self.record.max_model_len,
            max_receiving_share=cluster.config.kv_transfer.max_receiving_share,
        )
        self._engine = Engine(
            executor, settings, fingerprint=b"mock", max_inflight=cluster.config.engine.max_inflight
        )
        self.engine: EngineThread
        self.fabric: TransferThread
        self.task: asyncio.Task[None]

    @property
    def hello(self) -> Hello:
        return Hello("worker", self.record.worker_id, self.record.boot)

    @property
    def candidate(self) -> PrefillCandidate:
        return PrefillCandidate(self.record.worker_id, self.record.boot, self.record.address)

    @property
    def agent(self) -> PeerName:
        return PeerName(f"{self.record.worker_id}@{self.record.boot}")

    def new_transport(self) -> Transport:
        if self.cluster.config.kv_transfer.backend == "nixl":
            return NixlTransport(self.agent)
        return self.cluster.fabric.transport(self.agent)

    async def start_threads(
        self,
        on_events: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None],
        on_notification: Callable[[Notification], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.engine = EngineThread(
            self._engine, loop=loop, on_events=on_events, on_failure=on_failure
        )
        self.fabric = TransferThread(
            self.new_transport(),
            loop=loop,
            on_notification=on_notification,
            poll_s=0.0002,
            clock=SystemClock(),
            on_failure=on_failure,
        )
        self.engine.start()
        self.fabric.start()
        await self.fabric.call(lambda transport: transport.register(self.region))

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.fabric.stop()
        await self.engine.stop()
        self.region.close()

    async def stats(self) -> EngineStats:
        return await self.engine.call(lambda engine: engine.stats())


class PoolCluster:
    """One decode worker, some prefill workers, one router."""

    def __init__(self, config: Config, faults: Faults) -> None:
        self.config = config
        self._loop = asyncio.get_running_loop()
        self._posted = asyncio.Event()
        self.fabric = InProcessFabric(
            now=SystemClock().now,
            rng=random.Random(1),
            faults=faults,
            lock=threading.RLock(),
            on_event=self._on_fabric_event,
        )
        self.router = RouterEnd()
        self.decode_machine: Machine
        self.decode: DecodeWorker
        self.prefill_machines: list[Machine] = []
        self.prefills: list[PrefillWorker] = []
        self.streams: list[MemoryStream] = []
        self.dead: set[str] = set()
        self.arrived: list[Notification] = []
        self.preemptions: list[tuple[str, str]] = []
        self.transports: dict[str, list[str]] = defaultdict(list)

    @property
    def candidates(self) -> tuple[PrefillCandidate, ...]:
        return tuple(machine.candidate for machine in self.prefill_machines)

    async def add_prefill(self, num_blocks: int) -> None:
        name = f"prefill-{len(self.prefills)}"
        machine = Machine(self, name, Role.PREFILL, num_blocks)
        worker = PrefillWorker(machine.record, self.config, SystemClock())
        await machine.start_threads(
            worker.on_engine_events, worker.on_failure, lambda notification: None
        )
        ports = PrefillPorts(
            machine.engine,
            machine.fabric,
            machine.region,
            machine.new_transport,
            partial(self._on_transport, name),
        )
        machine.task = asyncio.create_task(worker.run(ports))
        self.prefill_machines.append(machine)
        self.prefills.append(worker)

    async def add_decode(self, role: Role, num_blocks: int) -> None:
        machine = self.decode_machine = Machine(self, "decode-0", role, num_blocks)
        worker = self.decode = DecodeWorker(
            machine.record, self.config, SystemClock(), vocab_size=VOCAB
        )
        await machine.start_threads(
            worker.on_engine_events, worker.on_failure, self._on_notification
        )
        ports = DecodePorts(
            machine.engine,
            machine.fabric,
            machine.region,
            self.connect,
            lambda _: None,
            lambda request_id: self.preemptions.append(("preempted", request_id)),
            lambda request_id: self.preemptions.append(("resumed", request_id)),
            partial(self._on_transport, "decode-0"),
        )
        machine.task = asyncio.create_task(worker.run(ports))
        hello = Hello("router", "router-0", new_boot())
        join_streams(hello, self.router, machine.hello, worker)

    async def connect(self, candidate: PrefillCandidate, listener: Any) -> Any:
        for machine, worker in zip(self.prefill_machines, self.prefills, strict=True):
            if machine.record.boot == candidate.boot and candidate.worker_id not in self.dead:
                hello = self.decode_machine.hello
                stream = join_streams(hello, listener, machine.hello, worker)
                self.streams.append(stream)
                return stream
        msg = f"{candidate.worker_id}: connection refused"
        raise PeerUnavailable(msg)

    async def kill_prefill(self, index: int, *, buffered_descriptors: int = 0) -> None:
        """The process is gone; what its kernel had buffered still lands."""
        machine = self.prefill_machines[index]
        self.dead.add(machine.record.worker_id)
        machine.task.cancel()
        self.fabric.kill(machine.agent, buffered_descriptors=buffered_descriptors)
        for stream in self.streams:
            if stream.peer.boot == machine.record.boot:
                stream.close("killed")

    def freeze_prefill(self, index: int) -> None:
        """The process stops; its heartbeats with it. Nothing is closed."""
        machine = self.prefill_machines[index]
        for stream in self.streams:
            if stream.peer.boot == machine.record.boot:
                stream.other.is_frozen = True
                stream.is_suspect = True
                stream.listener.on_suspect(stream, suspect=True)

    async def pushing(self) -> None:
        """Wait until the first write is posted."""
        async with asyncio.timeout(PATIENCE_S):
            await self._posted.wait()

    def _on_notification(self, notification: Notification) -> None:
        self.arrived.append(notification)
        self.decode.on_notification(notification)

    def _on_transport(self, worker: str, transport: str) -> None:
        self.transports[worker].append(transport)

    def _on_fabric_event(self, event: FabricEvent) -> None:
        if event.kind is Kind.POSTED:
            self._loop.call_soon_threadsafe(self._posted.set)

    async def until_idle(self, timeout_s: float = PATIENCE_S) -> EngineStats:
        """Wait until no block of any live worker is in use; then check every invariant."""
        machines = [
            self.decode_machine,
            *(m for m in self.prefill_machines if m.record.worker_id not in self.dead),
        ]
        async with asyncio.timeout(timeout_s):
            while True:
                stats = [await machine.stats() for machine in machines]
                if not any(map(blocks_in_use, stats)) and not self.decode.num_requests:
                    break
                await asyncio.sleep(0.02)
        for machine in machines:
            await machine.engine.call(lambda engine: engine.check_invariants())
        decode_stats = self.decode.stats()
        assert decode_stats is not None
        assert decode_stats.quarantined_attempts == 0
        return stats[0]

    def expect(self, request: EngineRequest, answer: Answer) -> None:
        """Compare an answer with the oracle."""
        for sample in range(request.sampling.n):
            wanted = expected_tokens(
                request.prompt, request.sampling, vocab_size=VOCAB, sample_index=sample
            )
            assert tuple(answer.tokens[sample]) == wanted, f"{request.request_id}[{sample}]"


def blocks_in_use(stats: EngineStats) -> int:
    """Return the blocks that are neither free nor cached."""
    return stats.blocks_owned + stats.blocks_reserved + stats.blocks_quarantined


def request_of(name: str, prompt: range | list[int], **sampling: Any) -> EngineRequest:
    """Return a request of `SamplingParams` fields."""
    fields: dict[str, Any] = {"max_tokens": 6, "eos_token_ids": (EOS,), **sampling}
    params = SamplingParams(**fields)
    return EngineRequest(RequestId(name), tuple(prompt), params)


def finished(answer: Answer, n: int = 1) -> bool:
    """Return whether every sample ended, or the request did."""
    return len(answer.reasons) == n or answer.failed is not None or answer.refused is not None


@asynccontextmanager
async def pool_cluster(
    *,
    num_prefills: int = 1,
    num_blocks: int = 64,
    prefill_blocks: int = 64,
    role: Role = Role.DECODE,
    faults: Faults | None = None,
    try_s: float = 2.0,
    quarantine_s: float = 0.3,
    chunk_tokens: int = 16,
    max_inflight: int = 1,
    backend: Literal["nixl", "inprocess"] = "inprocess",
    prompt_token_s: float = 0.0,
    verify: bool = False,
) -> AsyncGenerator[PoolCluster]:
    """Start a cluster, stop it, and fail if any of its tasks did."""
    config = Config(
        engine=EngineConfig(
            executor="mock",
            block_size=4,
            chunk_tokens=chunk_tokens,
            max_inflight=max_inflight,
            mock_step_s=0.0005,
            mock_prompt_token_s=prompt_token_s,
        ),
        kv_transfer=KvTransferConfig(
            backend=backend,
            try_s=try_s,
            quarantine_s=quarantine_s,
            max_receiving_share=0.5,
            verify=verify,
        ),
        control_plane=ControlPlaneConfig(heartbeat_s=0.05),
    )
    cluster = PoolCluster(config, faults or Faults())
    async with AsyncExitStack() as stack:
        for _ in range(num_prefills):
            await cluster.add_prefill(prefill_blocks)
            stack.push_async_callback(cluster.prefill_machines[-1].stop)
        await cluster.add_decode(role, num_blocks)
        stack.push_async_callback(cluster.decode_machine.stop)
        yield cluster
        for machine in [cluster.decode_machine, *cluster.prefill_machines]:
            if machine.task.done() and not machine.task.cancelled():
                machine.task.result()


async def served(answer: Answer, request: EngineRequest) -> Answer:
    """Return the answer once each of its samples ended."""
    return await answer.until(lambda a: finished(a, request.sampling.n))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what workers tell nobody."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)
