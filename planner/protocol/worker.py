"""One life of a worker's process: both real pools and the engine, on the simulation's drivers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from control_plane.roles.duty import Duty
from control_plane.roles.pools import Pools
from control_plane.rpc.interface import Stream, StreamListener
from core.clock import Clock
from core.ids import BlockId, Boot, RequestId, WorkerId
from core.kv_layout import KvLayout
from core.messages import (
    DecodeToPrefill,
    DrainWorker,
    PrefillCandidate,
    PrefillToDecode,
    SwitchRole,
    WorkerOrder,
)
from core.worker_record import Hello, Role, WorkerRecord
from decode_pool.ports import DecodePorts
from decode_pool.worker import DecodeWorker
from engine.events import CacheChanged
from engine.executor.mock_executor import MockDevice
from engine.executor.mock_pool import mock_layout
from engine.memory.block_pool import BlockState
from kv_transfer.transport import (
    PeerName,
    RemoteRegion,
    Span,
    TransferHandle,
    Transport,
)
from planner.protocol.engine_driver import SimEngine, StepTime
from planner.protocol.etcd import Entry
from planner.protocol.network import Server
from planner.protocol.process import Process, ProcessClock
from planner.protocol.region import SimRegion
from planner.protocol.replica import VOCABULARY, make_engine
from planner.protocol.transfer_driver import SimTransfer
from planner.protocol.worker_end import WorkerEnd
from planner.protocol.world import World
from prefill_pool.ports import PrefillPorts
from prefill_pool.worker import PrefillWorker


class Checks(Protocol):
    """Who looks at a worker's engine; `invariants.EngineChecks`."""

    def step_writes(self, worker: Worker, block_ids: list[BlockId]) -> None:
        """A step is about to write these blocks."""
        ...

    def after_round(self, worker: Worker) -> None:
        """Jobs or a step changed the engine."""
        ...

    def has_left(self, worker: Worker) -> None:
        """It has left, and thinks that nothing of it is wanted any more."""
        ...


class Worker:
    """Implements `nic.Agent`. Its pools run once `process.context` runs `main`.

    Args:
        role: its first.
        on_left: called once it has left as ordered; nothing of its process happens after that.

    Attributes:
        wanted_role: its first, or that of the last order.
    """

    def __init__(
        self,
        world: World,
        role: Role,
        process: Process,
        num_blocks: int,
        checks: Checks,
        on_left: Callable[[Worker], None],
    ) -> None:
        layout = mock_layout(world.config.engine.block_size)
        self._world = world
        self._process = process
        self._on_left = on_left
        self._region = SimRegion(num_blocks * layout.block_bytes)
        self.clock: Clock = ProcessClock(world.loop.time, process)
        self.record = _record_of(process, role, num_blocks, layout)
        self.decode = DecodeWorker(self.record, world.config, self.clock, vocab_size=VOCABULARY)
        self.prefill = PrefillWorker(self.record, world.config, self.clock)
        self.pools = Pools(role, self.decode, self.prefill, self._ordered)
        self.end = WorkerEnd()
        self.wanted_role = role
        self._duty: Duty
        step_time = StepTime()
        device = MockDevice(clock=self.clock, sleep=step_time.sleep)
        self.engine = make_engine(
            world.config,
            self._region,
            num_blocks,
            device,
            lambda blocks: checks.step_writes(self, blocks),
        )
        self.engine_driver = SimEngine(
            self.engine,
            process,
            loop=world.loop,
            dice=world.dice,
            step_time=step_time,
            on_events=self.pools.on_engine_events,
            on_failure=self.pools.on_failure,
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
    def num_fences(self) -> int:
        """How often its region moved."""
        return self._region.generation

    async def main(self) -> None:
        """Serve until the process ends, or has left."""
        world = self._world
        self.transfer_driver = SimTransfer(
            world.nic.transport(self.agent),
            self._process,
            loop=world.loop,
            dice=world.dice,
            fabric=self,
            on_notification=self.decode.on_notification,
        )
        world.nic.attach(self.agent, self)
        await self.transfer_driver.call(lambda transport: transport.register(self._region))
        world.network.listen(
            self.record.address,
            Server(
                self._process, self._hello, {"decode": self.prefill, "router": self.pools.front}
            ),
        )
        self._duty = self._make_duty(world.etcd.register(self._process, self.record))
        async with asyncio.TaskGroup() as group:
            switching = group.create_task(self._duty.run())
            group.create_task(self.prefill.run(self._prefill_ports()))
            group.create_task(self.decode.run(self._decode_ports()))
            await self.end.wait()
            switching.cancel()
            await self._duty.leave()
            self._on_left(self)

    def terminate(self) -> None:
        """SIGTERM; what an order said of the time for it holds."""
        if not self.end.is_stopped:
            self._leave_within(self._world.config.control_plane.drain_s)
        self.end.stop()

    def _ordered(self, order: WorkerOrder) -> None:
        match order:
            case DrainWorker(deadline_s):
                self._leave_within(deadline_s)
            case SwitchRole(role):
                self.wanted_role = role
        self._duty.order(order)

    def _leave_within(self, seconds: float) -> None:
        self.end.leave_by = self.clock.now() + seconds

    def _make_duty(self, entry: Entry) -> Duty:
        return Duty(
            self.record.role,
            self.pools,
            entry,
            health=self.end,
            end=self.end,
            drain_s=self._world.config.control_plane.drain_s,
            clock=self.clock,
        )

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

    def _hello(self) -> Hello:
        record = self.record
        return Hello(
            kind="worker",
            name=record.worker_id,
            boot=record.boot,
            model_fingerprint=record.model_fingerprint,
            layout=record.layout,
        )

    def _cache_changed(self, event: CacheChanged) -> None:
        self._world.etcd.cache_changed(self.record, event)

    def _prefill_ports(self) -> PrefillPorts:
        return PrefillPorts(
            engine=self.engine_driver,
            fabric=self.transfer_driver,
            region=self._region,
            new_transport=self._new_transport,
            on_renewed=self.decode.renewed,
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
            on_moved=self.prefill.expect,
            without_writes=self.prefill.without_writes,
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


def _record_of(process: Process, role: Role, num_blocks: int, layout: KvLayout) -> WorkerRecord:
    name = process.name
    return WorkerRecord(
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


def _nothing(_: RequestId) -> None:
    """A preempted request that runs again is of no interest here."""
