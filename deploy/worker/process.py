"""One worker process: its parts, its servers, its place in the cluster.

    parts -> gRPC and HTTP listen -> registered -> ready ... SIGTERM, or an order to drain
          -> refuse, finish or hand over -> deregister -> servers stop -> parts stop

Everything is owned by one exit stack. Whatever fails that should not (a pool, a thread, a server,
the place in the cluster) ends the process, with exit code 1: see `deploy.process_end`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from msgspec.structs import replace

from control_plane.etcd.client import EtcdClient
from control_plane.ledger.writer import LedgerWriter
from control_plane.registration import RegistrationHandle
from control_plane.registry import Registry
from control_plane.roles.duty import Duty
from control_plane.rpc.client import connect
from control_plane.rpc.interface import Stream, StreamListener
from control_plane.rpc.refusals import PeersRefused
from control_plane.rpc.server import RpcServer
from core.clock import Clock, SystemClock
from core.config import Config
from core.log import configure
from core.messages import DecodeToPrefill, PrefillCandidate, PrefillToDecode, WorkerOrder
from core.worker_record import Hello, WorkerRecord
from decode_pool.ports import DecodePorts
from deploy.options import WorkerOptions
from deploy.process_end import ProcessEnd
from deploy.readiness import Readiness, announce
from deploy.worker.cache_news import CacheNews
from deploy.worker.health import WorkerHealth
from deploy.worker.parts import WorkerParts, start_parts
from deploy.worker.probes import WorkerApp
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.transport import Health
from prefill_pool.ports import PrefillPorts
from router.web.server import ApiServer

_STOP_S = 1.0

_log = logging.getLogger(__name__)


async def run_worker(config: Config, options: WorkerOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UsageError: before readiness: the model, a setting or an address cannot be used.
        ExceptionGroup: something failed that should not.
    """
    configure(config.log, process=options.worker_id)
    end = ProcessEnd()
    async with AsyncExitStack() as stack:
        process = _WorkerProcess(config, options, SystemClock(), end)
        await process.start(stack)
        running = asyncio.create_task(process.run(), name=options.worker_id)
        end.must_run(running)
        if await end.comes_after(process.registered()):
            announce(options.ready_fd, await process.readiness())
        await end.wait()
        await process.leave()
        running.cancel()
        await asyncio.wait({running})


class _WorkerProcess:
    """Joins the parts to the control plane."""

    def __init__(
        self, config: Config, options: WorkerOptions, clock: Clock, end: ProcessEnd
    ) -> None:
        self._config = config
        self._options = options
        self._clock = clock
        self._end = end
        self._parts: WorkerParts
        self._health: WorkerHealth
        self._record: WorkerRecord
        self._registration: RegistrationHandle
        self._ledger: LedgerWriter
        self._news: CacheNews
        self._duty: Duty
        self._switching: asyncio.Task[None]
        self._refused = PeersRefused()

    async def start(self, stack: AsyncExitStack) -> None:
        """Start everything but what `run` runs; see `run_worker` for what is raised."""
        config, options = self._config, self._options
        parts = self._parts = await start_parts(config, options, self._clock, stack, self._on_order)
        parts.metrics.registry.register(self._refused)
        rpc = RpcServer(
            self._hello, config=config.control_plane, clock=self._clock, refused=self._refused
        )
        rpc.listen("decode", parts.prefill)
        rpc.listen("router", parts.pools.front)
        self._health = WorkerHealth(self._fabric_health, lambda: parts.pools.path_failure)
        app = WorkerApp(
            parts.metrics.registry, refresh=self._refresh, obstacle=self._health.obstacle
        )
        http = ApiServer(app, options.listen_host, 0, http=config.http, clock=self._clock)
        # The record is whole before the first stream: a handshake shows it.
        self._record = replace(
            parts.record, metrics_address=f"{options.advertise_host}:{http.port}"
        )
        port = await rpc.start(options.listen_host, options.listen_port)
        stack.push_async_callback(rpc.stop, _STOP_S)
        self._record = replace(self._record, address=f"{options.advertise_host}:{port}")
        http.start()
        stack.push_async_callback(http.stop, _STOP_S)
        self._end.must_run(asyncio.create_task(http.wait(), name="http server"))
        await self._join_cluster(stack)

    async def _join_cluster(self, stack: AsyncExitStack) -> None:
        settings = self._config.control_plane
        client = EtcdClient(settings, clock=self._clock)
        await client.connect()
        stack.push_async_callback(client.close)
        registry = Registry(
            client,
            settings.cluster,
            self._clock,
            lease_s=settings.lease_s,
            on_failure=self._end.fail,
        )
        self._registration = registry.register(self._record)
        stack.push_async_callback(self._registration.close)
        self._duty = Duty(
            self._options.role,
            self._parts.pools,
            self._registration,
            health=self._health,
            end=self._end,
            drain_s=settings.drain_s,
            clock=self._clock,
        )
        self._ledger = LedgerWriter(
            client,
            settings.cluster,
            self._registration,
            clock=self._clock,
            ledger_hz=settings.ledger_hz,
            on_failure=self._end.fail,
        )
        stack.push_async_callback(self._ledger.close)
        engine = self._parts.engine
        self._news = CacheNews(
            self._ledger,
            lambda: engine.call(lambda engine: engine.stats()),
            pace_s=settings.heartbeat_s,
        )

    async def run(self) -> None:
        """Serve; raises what must end the process."""
        parts = self._parts
        async with asyncio.TaskGroup() as group:
            group.create_task(self._news.tell_totals())
            self._switching = group.create_task(self._duty.run())
            group.create_task(parts.prefill.run(self._prefill_ports()))
            group.create_task(parts.decode.run(self._decode_ports()))

    async def leave(self) -> None:
        """Drain; what runs goes on meanwhile."""
        self._switching.cancel()
        await self._duty.leave()

    async def registered(self) -> None:
        """Return once the worker's entry is in etcd, however long etcd is away."""
        await self._registration.wait_registered()
        self._health.registered()

    async def readiness(self) -> Readiness:
        """Return what the launcher prints."""
        record = self._record
        health = await self._fabric_health()
        return Readiness(
            name=record.worker_id,
            pid=record.pid,
            address=record.address,
            fabric=record.fabric,
            transport=health.transport,
            model=record.model,
        )

    def _on_order(self, order: WorkerOrder) -> None:
        self._duty.order(order)  # routers know of this worker once it has registered

    def _hello(self) -> Hello:
        record = self._record
        return Hello(
            kind="worker",
            name=record.worker_id,
            boot=record.boot,
            cluster=self._config.control_plane.cluster,
            model_fingerprint=record.model_fingerprint,
            layout=record.layout,
        )

    def _fabric_health(self) -> asyncio.Future[Health]:
        return self._parts.fabric.call(lambda transport: transport.health())

    def _transport_seen(self, transport: str) -> None:
        """Correct what is registered: at the start, nothing had been written yet."""
        if transport != self._registration.record.transport:
            _log.info("KV goes over %s", transport)
            self._registration.update(transport=transport)

    async def _refresh(self) -> None:
        """Take fresh snapshots for a scrape."""
        parts = self._parts
        parts.metrics.show_engine(await parts.engine.call(lambda engine: engine.stats()))
        health = await self._fabric_health()
        seen = self._registration.record.transport  # of inbound writes, too
        parts.metrics.fabric.show(replace(health, transport=seen))

    # --- what the pools are wired to --------------------------------------------------------

    def _prefill_ports(self) -> PrefillPorts:
        parts, listen = self._parts, self._config.kv_transfer.listen
        return PrefillPorts(
            engine=parts.engine,
            fabric=parts.fabric,
            region=parts.region,
            new_transport=lambda: NixlTransport(parts.agent, listen=listen),
            on_transport=self._transport_seen,
            on_renewed=parts.decode.renewed,
        )

    def _decode_ports(self) -> DecodePorts:
        parts = self._parts
        return DecodePorts(
            engine=parts.engine,
            fabric=parts.fabric,
            region=parts.region,
            connect=self._connect,
            on_transport=self._transport_seen,
            on_cache_changed=self._news.cache_changed,
            on_preempted=self._news.preempted,
            on_resumed=self._ledger.resumed,
            on_moved=parts.prefill.expect,
            without_writes=parts.prefill.without_writes,
        )

    async def _connect(
        self, candidate: PrefillCandidate, listener: StreamListener[PrefillToDecode]
    ) -> Stream[DecodeToPrefill]:
        hello = replace(self._hello(), kind="decode", expected_boot=candidate.boot)
        return await connect(
            candidate.address,
            hello,
            listener,
            config=self._config.control_plane,
            clock=self._clock,
            refused=self._refused,
        )
