"""One life of a worker's process: the real pool and engine, on the simulation's drivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from control_plane.rpc.interface import Stream, StreamListener
from core.clock import Clock
from core.ids import BlockId, Boot, RequestId, WorkerId
from core.messages import DecodeToPrefill, PrefillCandidate, PrefillToDecode
from core.worker_record import Hello, Role, WorkerRecord
from decode_pool.ports import DecodePorts
from decode_pool.worker import DecodeWorker
from engine.engine import Engine, settings_for
from engine.events import CacheChanged
from engine.executor.mock_executor import MockDevice
from engine.executor.mock_pool import mock_layout
from engine.memory.block_pool import BlockState
from kv_transfer.transport import (
    Notification,
    PeerName,
    RemoteRegion,
    Span,
    TransferHandle,
    Transport,
)
from planner.protocol.engine_driver import SimEngine, StepTime
from planner.protocol.executor import SimExecutor
from planner.protocol.network import Server
from planner.protocol.process import Process, ProcessClock
from planner.protocol.region import SimRegion
from planner.protocol.transfer_driver import SimTransfer
from planner.protocol.world import World
from prefill_pool.ports import PrefillPorts
from prefill_pool.worker import PrefillWorker

VOCABULARY = 997


class Checks(Protocol):
    """Who looks at a worker's engine; `invariants.EngineChecks`."""

    def step_writes(self, worker: Worker, block_ids: list[BlockId]) -> None:
        """A step is about to write these blocks."""
        ...

    def after_round(self, worker: Worker) -> None:
        """Jobs or a step changed the engine."""
        ...


class Worker:
    """Implements `nic.Agent`. Its pool runs once `process.context` runs `main`."""

    def __init__(
        self,
        world: World,
        role: Role,
        process: Process,
        num_blocks: int,
        checks: Checks,
    ) -> None:
        name = process.name
        layout = mock_layout(world.config.engine.block_size)
        self._world = world
        self._process = process
        self._region = SimRegion(num_blocks * layout.block_bytes)
        self.clock: Clock = ProcessClock(world.loop.time, process)
        self.record = WorkerRecord(
            worker_id=WorkerId(name),
            boot=Boot(f"{name}-life-{process.life}"),
            registration=process.life,
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
        self.pool = (PrefillWorker if role is Role.PREFILL else DecodeWorker)(
            self.record, world.config, self.clock
        )
        step_time = StepTime()
        device = MockDevice(clock=self.clock, sleep=step_time.sleep)
        self.engine = _engine(
            world, self._region, num_blocks, device, lambda blocks: checks.step_writes(self, blocks)
        )
        self.engine_driver = SimEngine(
            self.engine,
            process,
            loop=world.loop,
            dice=world.dice,
            step_time=step_time,
            on_events=self.pool.on_engine_events,
            on_failure=self.pool.on_failure,
            before_step=self._poison_free_blocks,
            after_round=lambda: checks.after_round(self),
        )
        self.transfer_driver: SimTransfer

    # --- nic.Agent --------------------------------------------------------------------------------

    @property
    def process(self) -> Process:
        """Its process."""
        return self._process

    @property
    def region(self) -> SimRegion:
        """Its KV memory."""
        return self._region

    @property
    def block_bytes(self) -> int:
        """Size of its blocks."""
        return self.record.block_bytes

    @property
    def is_target(self) -> bool:
        """Whether others write to it."""
        return self.record.role is not Role.PREFILL

    @property
    def is_polling(self) -> bool:
        """Whether it looks at the fabric."""
        return self.transfer_driver.is_polling

    def fabric_has_news(self) -> None:
        """Something arrived or ended."""
        self.transfer_driver.wake()

    # --- the process ------------------------------------------------------------------------------

    @property
    def agent(self) -> PeerName:
        """Its name on the fabric."""
        return PeerName(f"{self.record.worker_id}@{self.record.boot}")

    @property
    def num_open(self) -> int:
        """Requests, or attempts, that it works on."""
        pool = self.pool
        return pool.num_attempts if isinstance(pool, PrefillWorker) else pool.num_requests

    @property
    def num_fences(self) -> int:
        """How often its region moved."""
        return self._region.generation

    async def main(self) -> None:
        """Serve until the process ends."""
        world = self._world
        self.transfer_driver = SimTransfer(
            world.nic.transport(self.agent),
            self._process,
            loop=world.loop,
            dice=world.dice,
            fabric=self,
            on_notification=self._on_notification,
        )
        world.nic.attach(self.agent, self)
        await self.transfer_driver.call(lambda transport: transport.register(self._region))
        world.network.listen(
            self.record.address, Server(self._process, self._hello, self._listeners())
        )
        world.etcd.register(self._process, self.record)
        if isinstance(self.pool, PrefillWorker):
            await self.pool.run(self._prefill_ports())
        else:
            await self.pool.run(self._decode_ports())

    def posted(
        self,
        handle: TransferHandle,
        remote: RemoteRegion,
        local: Sequence[Span],
        target: Sequence[Span],
        tag: bytes,
    ) -> None:
        """It posted a write."""
        self._world.nic.posted(self.agent, handle, remote, local, target, tag)

    def poke(self) -> None:
        """The fabric may have something due."""
        self._world.nic.poke()

    def polling_changed(self) -> None:
        """It began or stopped to poll."""
        self._world.nic.polling_changed()

    def _on_notification(self, notification: Notification) -> None:
        assert isinstance(self.pool, DecodeWorker), "nobody writes to a prefill worker"
        self.pool.on_notification(notification)

    def _hello(self) -> Hello:
        record = self.record
        return Hello(
            kind="worker",
            name=record.worker_id,
            boot=record.boot,
            model_fingerprint=record.model_fingerprint,
            layout=record.layout,
        )

    def _listeners(self) -> dict[str, StreamListener[Any]]:
        if isinstance(self.pool, PrefillWorker):
            return {"decode": self.pool, "router": self.pool.router_streams}
        return {"router": self.pool}

    def _cache_changed(self, event: CacheChanged) -> None:
        self._world.etcd.cache_changed(self.record, event)

    def _prefill_ports(self) -> PrefillPorts:
        return PrefillPorts(
            engine=self.engine_driver,
            fabric=self.transfer_driver,
            region=self._region,
            new_transport=self._new_transport,
            on_cache_changed=self._cache_changed,
        )

    def _new_transport(self) -> Transport:
        self._world.log.add(str(self._process), "renews its fabric agent")
        return self._world.nic.transport(self.agent)

    def _decode_ports(self) -> DecodePorts:
        return DecodePorts(
            engine=self.engine_driver,
            fabric=self.transfer_driver,
            region=self._region,
            connect=self._connect,
            on_cache_changed=self._cache_changed,
            on_preempted=self._preempted,
            on_resumed=_nothing,
        )

    def _preempted(self, request_id: RequestId) -> None:
        self._world.log.add(str(self._process), "preempts", request_id)

    async def _connect(
        self, candidate: PrefillCandidate, listener: StreamListener[PrefillToDecode]
    ) -> Stream[DecodeToPrefill]:
        hello = msgspec.structs.replace(self._hello(), kind="decode", expected_boot=candidate.boot)
        return await self._world.network.connect(self._process, candidate.address, hello, listener)

    def _poison_free_blocks(self) -> None:
        """Before a step, see that nothing is left in a free block."""
        pool, memory = self.engine.scheduler.state.memory.pool, self._region.view()
        for block_id in map(BlockId, range(pool.num_blocks)):
            if pool.state(block_id) is BlockState.FREE:
                self._world.contents.poison(memory, block_id)


def _engine(
    world: World,
    region: SimRegion,
    num_blocks: int,
    device: MockDevice,
    on_write: Callable[[list[BlockId]], None],
) -> Engine:
    config = world.config
    executor = SimExecutor(
        mock_layout(config.engine.block_size),
        region,
        num_blocks=num_blocks,
        vocab_size=VOCABULARY,
        config=config.engine,
        device=device,
    )
    executor.on_write = on_write
    settings = settings_for(
        executor,
        config.engine,
        max_model_len=num_blocks * config.engine.block_size,
        max_receiving_share=config.kv_transfer.max_receiving_share,
        vocab_size=VOCABULARY,
    )
    return Engine(
        executor,
        settings,
        fingerprint=bytes.fromhex(executor.layout.model),
        max_inflight=config.engine.max_inflight,
    )


def _nothing(_: RequestId) -> None:
    """A preempted request that runs again is of no interest here."""
