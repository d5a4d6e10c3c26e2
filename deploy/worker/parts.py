"""The parts of a worker that compute and move bytes, started in an order that wastes no second.

region -> (weights | fabric agent, at once) -> both pools -> threads

Each part is stopped by the exit stack, after whatever was started later: threads first, then the
agent with the transfer thread, the region last, when nothing can read or write it any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import AsyncExitStack
from dataclasses import dataclass

from control_plane.roles.pools import Pools
from control_plane.roles.router_front import OnOrder
from core.clock import Clock
from core.config import Config
from core.errors import ConfigError, FabricError
from core.ids import new_boot
from core.worker_record import WorkerRecord
from decode_pool.worker import DecodeWorker
from deploy.options import WorkerOptions
from deploy.worker.metrics import WorkerMetrics
from deploy.worker.replica import ReplicaPlan, load_executor, make_engine, plan_replica
from engine.engine_thread import EngineThread
from engine.executor.interface import Executor
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.region import HostRegion
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import PeerName
from prefill_pool.worker import PrefillWorker

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """One worker's inside.

    Attributes:
        record: who it is; its addresses are empty until its servers listen.
        agent: its name on the fabric.
        pools: both of them, and which takes new work.
    """

    record: WorkerRecord
    agent: PeerName
    region: HostRegion
    engine: EngineThread
    fabric: TransferThread
    decode: DecodeWorker
    prefill: PrefillWorker
    pools: Pools
    metrics: WorkerMetrics


async def start_parts(
    config: Config, options: WorkerOptions, clock: Clock, stack: AsyncExitStack, on_order: OnOrder
) -> WorkerParts:
    """Load the model, start the fabric, and start both threads.

    Args:
        on_order: hears what operators ask of this worker.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: a setting cannot be used.
        FabricError: the fabric does not start.
    """
    if config.kv_transfer.backend != "nixl":
        msg = (
            f"kv_transfer.backend = {config.kv_transfer.backend!r}: joins workers inside one "
            "process only (tests, simulation); a worker process needs 'nixl'"
        )
        raise ConfigError(msg)
    plan = plan_replica(config, options.model_path)
    region = _open_region(plan, stack)
    boot = new_boot()
    agent = PeerName(f"{options.worker_id}@{boot}")
    executor, transport = await asyncio.gather(
        asyncio.to_thread(load_executor, config, plan, options.model_path, region),
        asyncio.to_thread(NixlTransport, agent, listen=config.kv_transfer.listen),
    )
    record = WorkerRecord(
        worker_id=options.worker_id,
        boot=boot,
        registration=0,  # etcd's client counts
        role=options.role,
        address="",
        metrics_address="",
        model=plan.model_name,
        model_fingerprint=plan.spec.fingerprint,
        layout=plan.layout.summary(),
        numerics=executor.numerics,
        block_size=plan.layout.block_size,
        block_bytes=plan.layout.block_bytes,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        fabric=config.kv_transfer.backend,
        transport=transport.health().transport,
        pid=os.getpid(),
    )
    decode = DecodeWorker(record, config, clock, vocab_size=plan.spec.vocab_size)
    prefill = PrefillWorker(record, config, clock)
    pools = Pools(options.role, decode, prefill, on_order)
    metrics = WorkerMetrics(record, decode, prefill)
    engine = _start_engine(config, plan, executor, pools, stack)
    fabric = _start_fabric(config, transport, decode, metrics, clock, stack)
    await fabric.call(lambda handed_over: handed_over.register(region))
    return WorkerParts(record, agent, region, engine, fabric, decode, prefill, pools, metrics)


def _open_region(plan: ReplicaPlan, stack: AsyncExitStack) -> HostRegion:
    """Map the pool. Its pages come in the background: a start does not wait for a GiB of zeroes,
    and neither do, once they are there, a kernel's and a peer's first writes."""
    region = HostRegion(plan.num_blocks * plan.layout.block_bytes)
    pages = threading.Thread(target=_prefault, args=(region,), name="prefault", daemon=True)
    pages.start()
    stack.callback(pages.join)
    stack.callback(region.close)  # runs before the join, and makes it short
    return region


def _prefault(region: HostRegion) -> None:
    # On Linux a priority is a thread's own: loading the weights and the first steps come first.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    try:
        region.prefault()
    except FabricError as error:
        _log.warning("the KV pool is not backed by memory yet: %s", error)


def _start_engine(
    config: Config,
    plan: ReplicaPlan,
    executor: Executor,
    pools: Pools,
    stack: AsyncExitStack,
) -> EngineThread:
    engine = EngineThread(
        make_engine(config, plan, executor),
        loop=asyncio.get_running_loop(),
        on_events=pools.on_engine_events,
        on_failure=pools.on_failure,
    )
    stack.push_async_callback(engine.stop)
    engine.start()
    return engine


def _start_fabric(
    config: Config,
    transport: NixlTransport,
    decode: DecodeWorker,
    metrics: WorkerMetrics,
    clock: Clock,
    stack: AsyncExitStack,
) -> TransferThread:
    fabric = TransferThread(
        transport,
        loop=asyncio.get_running_loop(),
        on_notification=decode.on_notification,
        poll_s=config.kv_transfer.poll_s,
        clock=clock,
        on_outcome=metrics.fabric.observe,
        on_failure=decode.on_failure,
    )
    stack.push_async_callback(fabric.stop)
    fabric.start()
    return fabric
