"""The decode worker as its process sees it: a listener for routers, and one task.

Callbacks put what they hear into an inbox; `run` hands it to `Requests`, sends the tokens of all of
it in one message a stream, ticks, and tells routers the load. Whatever fails there ends `run`, and
with it the process.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, NoReturn, assert_never

import msgspec

from control_plane.rpc.inbox import Inbox
from control_plane.rpc.interface import Stream
from control_plane.rpc.load_reports import LoadReports
from control_plane.rpc.report_pace import ReportPace
from core.clock import Clock
from core.config import Config
from core.ids import Boot
from core.messages import (
    AbortRequest,
    MoveRequest,
    PrefillToDecode,
    RegionDescriptor,
    RouterToWorker,
    StartRequest,
    WriteNotification,
)
from core.worker_record import Role, WorkerRecord
from decode_pool.live_request import LiveRequest
from decode_pool.ports import DecodePorts
from decode_pool.prefill_peers import PrefillPeers
from decode_pool.receiving import Owner, Receiving
from decode_pool.requests import Requests
from decode_pool.stats import DecodeStats
from decode_pool.token_outbox import TokenOutbox
from decode_pool.verification import Verification
from engine.events import Event
from engine.interface import EngineApi
from kv_transfer.transport import Notification
from kv_transfer.transports_seen import TransportsSeen

_log = logging.getLogger(__name__)

TICK_S = 0.1
"""Between looks at deadlines while there are requests or quarantined blocks."""

_notifications = msgspec.msgpack.Decoder(WriteNotification)


class DecodeWorker:
    """`StreamListener[RouterToWorker]`, of routers' streams while the role is decode or both.

    It runs in any role, as that may change.

    Args:
        record: who this worker is.
        config: sections `kv_transfer` and `control_plane`.
        vocab_size: of the model; None where peers' tokens are not held against it.
    """

    def __init__(
        self, record: WorkerRecord, config: Config, clock: Clock, *, vocab_size: int | None = None
    ) -> None:
        self._record = record
        self._config = config
        self._clock = clock
        self._vocab_size = vocab_size
        self._inbox: Inbox[Requests] = Inbox()
        self._busy = asyncio.Event()
        self._reports = ReportPace(config.control_plane.heartbeat_s, clock)
        self._requests: Requests | None = None
        self._ports: DecodePorts | None = None
        self._load = LoadReports()
        self._transports = TransportsSeen()
        self._has_new_agent = asyncio.Event()

    # --- StreamListener: routers ------------------------------------------------------------

    def on_open(self, stream: Stream[Any]) -> None:
        """A router connected: it learns the load at once."""
        self._load.opened(stream)

    def on_message(self, stream: Stream[Any], message: RouterToWorker) -> None:
        """A start, an abort or a move."""
        match message:
            case StartRequest():
                self._inbox.put(lambda requests: requests.start(stream, message, self._on_added))
            case AbortRequest():
                self._inbox.put(lambda requests: requests.abort(message))
            case MoveRequest():
                self._inbox.put(lambda requests: requests.move(message))
            case _:
                assert_never(message)

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        """A silent router may come back; its requests go on until its stream closes."""

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        """A router left: end its requests."""
        _log.info("router %s left: %s", stream.peer.name, reason)
        self._load.closed(stream)
        self._inbox.put(lambda requests: requests.router_closed(stream))

    # --- the threads ------------------------------------------------------------------------

    def on_engine_events(self, events: list[Event]) -> None:
        """For `EngineThread`: the events of one step."""
        self._inbox.put(lambda requests: requests.engine_says(events))

    def on_failure(self, error: BaseException) -> None:
        """For `EngineThread` and `TransferThread`: end `run` with what ended the thread."""
        self._inbox.fail(error)

    def on_notification(self, notification: Notification) -> None:
        """For `TransferThread`: a peer's write has landed."""
        try:
            write = _notifications.decode(notification.payload)
        except msgspec.DecodeError as error:
            _log.error("%s: a write's notification is not understood: %s", notification.peer, error)
            return
        if write.transport and self._transports.add(write.transport):
            self._tell_transport()
        self._inbox.put(lambda requests: requests.receiving.landed(write))

    def _tell_transport(self) -> None:
        if self._ports is not None and self._ports.on_transport is not None:
            self._ports.on_transport(self._transports.text)

    def _on_added(self, live: LiveRequest, future: asyncio.Future[None]) -> None:
        self._inbox.put(lambda requests: requests.engine_answered(live, future))

    def _on_joined(self, live: LiveRequest, future: asyncio.Future[None]) -> None:
        self._inbox.put(lambda requests: requests.receiving.joined(live, future))

    # --- the process ------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Requests in flight here."""
        return 0 if self._requests is None else len(self._requests)

    @property
    def num_open(self) -> int:
        """Requests in flight here, and attempts whose blocks a late write may reach."""
        return 0 if self._requests is None else self._requests.num_open

    @property
    def path_failure(self) -> str:
        """Why no KV comes from anybody, see `kv_transfer.paths`; empty where it does."""
        return "" if self._requests is None else self._requests.receiving.paths.failure

    def refuse(self, reason: str) -> None:
        """Take no new request from now on: "draining" or "wrong_role"; "" takes them again. Routers
        hear at once that it drains."""
        self._inbox.put(lambda requests: requests.refuse(reason))
        self._load.drain(is_draining=reason == "draining")

    def serve_as(self, role: Role) -> None:
        """Requests that come from now on are those of a worker of this role."""
        self._inbox.put(lambda requests: requests.serve_as(role))

    def fail_over(self, message: str) -> None:
        """End what is left, for routers to go on with elsewhere."""
        self._inbox.put(lambda requests: requests.fail_over(message))

    def renewed(self) -> None:
        """The fabric's agent was renewed: asks must carry the new one's address."""
        self._has_new_agent.set()

    def stats(self) -> DecodeStats | None:
        """Return gauges and counters, None before `run`."""
        return None if self._requests is None else self._requests.stats()

    async def run(self, ports: DecodePorts) -> NoReturn:
        """Serve until cancelled.

        Raises:
            ExceptionGroup: something failed that should not; the process must end.
        """
        self._ports = ports
        region = await self._describe_region(ports)
        outbox = TokenOutbox()
        async with asyncio.TaskGroup() as group:
            peers = PrefillPeers(
                ports.connect, _PrefillListener(self._inbox), group, self._on_unreachable
            )
            requests = self._requests = Requests(
                self._record,
                self._config.kv_transfer,
                ports,
                outbox,
                partial(self._receiving, ports=ports, peers=peers, region=region, group=group),
                self._clock,
            )
            group.create_task(self._tick())
            group.create_task(self._describe_new_agents(ports))
            group.create_task(self._tell_load(requests, ports))
            try:
                while True:
                    for callback in await self._inbox.take():
                        callback(requests)
                    outbox.flush()
                    self._reports.stir()
                    if requests.is_idle:
                        self._busy.clear()
                    else:
                        self._busy.set()
            finally:
                peers.close()
        msg = "a task group ended without an exception"
        raise AssertionError(msg)

    def _receiving(
        self,
        owner: Owner,
        *,
        ports: DecodePorts,
        peers: PrefillPeers,
        region: RegionDescriptor,
        group: asyncio.TaskGroup,
    ) -> Receiving:
        return Receiving(
            owner,
            engine=ports.engine,
            fabric=ports.fabric,
            peers=peers,
            region=region,
            on_joined=self._on_joined,
            start_fence=lambda: group.create_task(self._fence(ports)),
            release_sinks=lambda: ports.engine.post(lambda _: ports.region.release_sinks()),
            verification=self._verification(ports),
            vocab_size=self._vocab_size,
            quarantine_s=self._config.kv_transfer.quarantine_s,
            clock=self._clock,
        )

    def _verification(self, ports: DecodePorts) -> Verification | None:
        if not self._config.kv_transfer.verify:
            return None
        return Verification(ports.fabric, self._record.block_bytes, self._on_summed)

    def _on_summed(self, write: WriteNotification, future: asyncio.Future[int]) -> None:
        self._inbox.put(lambda requests: requests.receiving.summed(write, future))

    def _on_unreachable(self, boot: Boot, reason: str) -> None:
        self._inbox.put(lambda requests: requests.receiving.peer_unreachable(boot, reason))

    async def _describe_region(self, ports: DecodePorts) -> RegionDescriptor:
        metadata = await ports.fabric.call(lambda transport: transport.metadata())
        return RegionDescriptor(
            worker_id=self._record.worker_id,
            boot=self._record.boot,
            generation=ports.region.generation,
            address=ports.region.address,
            num_bytes=ports.region.num_bytes,
            block_bytes=self._record.block_bytes,
            layout=self._record.layout,
            metadata=metadata,
        )

    async def _fence(self, ports: DecodePorts) -> None:
        """Between two steps late writes lose the pool; then peers can be told its new address."""

        def move(engine: EngineApi) -> None:
            engine.settle()
            ports.region.fence()

        async with ports.without_writes():
            await ports.engine.call(move)
            await ports.fabric.call(lambda transport: transport.register(ports.region))
        region = await self._describe_region(ports)
        _log.warning("fenced the KV region: generation %d", region.generation)
        self._inbox.put(lambda requests: requests.receiving.region_ready(region))

    async def _describe_new_agents(self, ports: DecodePorts) -> None:
        while True:
            await self._has_new_agent.wait()
            self._has_new_agent.clear()
            region = await self._describe_region(ports)
            self._inbox.put(partial(_describe, region=region))

    async def _tick(self) -> None:
        while True:
            await self._busy.wait()  # a worker without requests sleeps
            await asyncio.sleep(TICK_S)
            self._inbox.put(Requests.tick)

    async def _tell_load(self, requests: Requests, ports: DecodePorts) -> None:
        while True:
            stats = await ports.engine.call(lambda engine: engine.stats())
            requests.receiving.is_starving = requests.is_starving(stats)
            self._load.tell(requests.load(stats))
            await self._reports.next(is_idle=requests.is_idle)


def _describe(requests: Requests, *, region: RegionDescriptor) -> None:
    requests.receiving.region_described(region)


class _PrefillListener:
    """`StreamListener[PrefillToDecode]`: what prefill workers say goes into the same inbox."""

    def __init__(self, inbox: Inbox[Requests]) -> None:
        self._inbox = inbox

    def on_open(self, stream: Stream[Any]) -> None:
        self._inbox.put(lambda requests: requests.receiving.peer_opened(stream))

    def on_message(self, stream: Stream[Any], message: PrefillToDecode) -> None:
        peer = stream.peer.boot
        self._inbox.put(lambda requests: requests.receiving.prefill_says(peer, message))

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        self._inbox.put(lambda requests: requests.receiving.peer_suspect(stream, suspect=suspect))

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        self._inbox.put(lambda requests: requests.receiving.peer_closed(stream, reason))
