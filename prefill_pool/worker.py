"""The prefill worker as its process sees it: a listener for decode workers, and one task.

Callbacks put what they hear into an inbox; `run` hands it to `Attempts`, ticks, and tells routers
the load. Whatever fails there ends `run`, and with it the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn

from msgspec.structs import replace

from control_plane.rpc.inbox import Inbox
from control_plane.rpc.interface import Stream
from control_plane.rpc.load_reports import LoadReports
from control_plane.rpc.report_pace import ReportPace
from core.clock import Clock
from core.config import Config
from core.ids import RequestId
from core.messages import DecodeToPrefill, PrefillAsk
from core.worker_record import WorkerRecord
from engine.events import Event
from engine.load import load_of
from kv_transfer.handoff.prefill_side import PrefillTerms
from kv_transfer.paths import with_paths
from kv_transfer.transport import Transport
from prefill_pool.attempts import Attempts
from prefill_pool.ports import PrefillPorts
from prefill_pool.pusher import Pusher
from prefill_pool.router_streams import RouterStreams
from prefill_pool.stats import PrefillStats

_log = logging.getLogger(__name__)

QUIET_S = 1.0
"""How long writes may take to end where the region must move."""

TICK_S = 0.1
"""Between looks at deadlines while there are attempts."""


class PrefillWorker:
    """`StreamListener[DecodeToPrefill]`.

    Args:
        record: who this worker is.
        config: sections `kv_transfer` and `control_plane`.
    """

    def __init__(self, record: WorkerRecord, config: Config, clock: Clock) -> None:
        self._record = record
        self._config = config
        self._clock = clock
        self._inbox: Inbox[Attempts] = Inbox()
        self._reports = ReportPace(config.control_plane.heartbeat_s, clock)
        self._attempts: Attempts | None = None
        self._pusher: Pusher | None = None
        self._renew: Callable[[], Awaitable[None]] | None = None
        self._load = LoadReports()
        self.router_streams = RouterStreams(self._load)

    # --- StreamListener ---------------------------------------------------------------------

    def on_open(self, stream: Stream[Any]) -> None:
        """A decode worker connected."""
        self._inbox.put(lambda attempts: attempts.stream_opened(stream))

    def on_message(self, stream: Stream[Any], message: DecodeToPrefill) -> None:
        """An ask or a settle."""
        if isinstance(message, PrefillAsk):
            self._inbox.put(lambda attempts: attempts.asked(stream, message))
        else:
            self._inbox.put(lambda attempts: attempts.settle(stream, message.handoff))

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        """A silent decode worker's writes go on; they end by themselves, or by its stream."""

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        """A decode worker left: settle all that it asked for."""
        _log.info("decode worker %s left: %s", stream.peer.name, reason)
        self._inbox.put(lambda attempts: attempts.stream_closed(stream))

    # --- the engine's thread ----------------------------------------------------------------

    def on_engine_events(self, events: list[Event]) -> None:
        """For `EngineThread`: the events of one step."""
        self._inbox.put(lambda attempts: attempts.engine_says(events))

    def on_failure(self, error: BaseException) -> None:
        """For `EngineThread` and `TransferThread`: end `run` with what ended the thread."""
        self._inbox.fail(error)

    # --- the process ------------------------------------------------------------------------

    @property
    def num_attempts(self) -> int:
        """Attempts that this worker works on; their blocks are held."""
        return 0 if self._attempts is None else len(self._attempts)

    @property
    def num_open(self) -> int:
        """Attempts, and requests that ran here and may yet be asked for."""
        attempts = self._attempts
        return 0 if attempts is None else len(attempts) + attempts.num_expected

    @property
    def path_failure(self) -> str:
        """Why no KV can be pushed to anybody, see `kv_transfer.paths`; empty where it can."""
        return "" if self._attempts is None else self._attempts.paths.failure

    def refuse(self, reason: str) -> None:
        """Take no new prompt from now on: "draining" or "wrong_role"; "" takes them again."""
        self._inbox.put(lambda attempts: attempts.refuse(reason))
        self._load.drain(is_draining=reason == "draining")

    def expect(self, request_id: RequestId) -> None:
        """A request that ran here goes on elsewhere: take an ask of it, whatever is refused."""
        if self._attempts is not None:
            self._attempts.expect(request_id)

    @asynccontextmanager
    async def without_writes(self) -> AsyncGenerator[None]:
        """Inside, no write reads this worker's region; one that will not end loses its agent."""
        pusher, renew = self._pusher, self._renew
        if pusher is None or renew is None:
            yield
            return
        pusher.hold()
        try:
            try:
                async with asyncio.timeout(QUIET_S):
                    await pusher.quiet()
            except TimeoutError:
                pusher.refuse_held("this worker's KV region moves")
                await renew()
            yield
        finally:
            pusher.resume()

    def stats(self) -> PrefillStats | None:
        """Return gauges and counters, None before `run`."""
        return None if self._attempts is None else self._attempts.stats()

    async def run(self, ports: PrefillPorts) -> NoReturn:
        """Serve until cancelled.

        Raises:
            ExceptionGroup: something failed that should not; the process must end.
        """
        record, fabric = self._record, self._config.kv_transfer
        pusher = self._pusher = Pusher(ports.fabric, record.boot, ports.on_transport)
        attempts = self._attempts = Attempts(
            PrefillTerms(record.layout, record.block_size, record.block_bytes, fabric.try_s),
            ports.engine,
            pusher,
            later=self._inbox.put,
            clock=self._clock,
            quarantine_s=fabric.quarantine_s,
        )
        self._renew = partial(self._renew_agent, attempts, pusher, ports)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tick(attempts, self._renew))
            group.create_task(self._tell_progress(attempts))
            group.create_task(self._tell_load(attempts, pusher, ports))
            while True:
                for callback in await self._inbox.take():
                    callback(attempts)
                self._reports.stir()
        msg = "a task group ended without an exception"
        raise AssertionError(msg)

    async def _tick(self, attempts: Attempts, renew: Callable[[], Awaitable[None]]) -> None:
        while True:
            await attempts.busy.wait()
            await asyncio.sleep(TICK_S)
            self._inbox.put(Attempts.tick)
            if attempts.is_renewal_due():
                await renew()

    async def _renew_agent(self, attempts: Attempts, pusher: Pusher, ports: PrefillPorts) -> None:
        def make() -> Transport:
            transport = ports.new_transport()
            transport.register(ports.region)
            return transport

        posted = attempts.posted()
        await pusher.renew(make)
        self._inbox.put(partial(Attempts.agent_destroyed, posted=posted))
        if ports.on_renewed is not None:
            ports.on_renewed()

    async def _tell_progress(self, attempts: Attempts) -> None:
        while True:
            await attempts.busy.wait()
            await asyncio.sleep(self._config.control_plane.heartbeat_s)
            self._inbox.put(Attempts.tell_progress)

    async def _tell_load(self, attempts: Attempts, pusher: Pusher, ports: PrefillPorts) -> None:
        while True:
            await self._load.wait_for_router()
            stats = await ports.engine.call(lambda engine: engine.stats())
            load = load_of(stats, transfer_bytes_per_s=pusher.bytes_per_s)
            load = replace(load, fences=ports.region.generation)  # of the roles before this, too
            self._load.tell(with_paths(load, attempts.paths, self._clock.now()))
            await self._reports.next(is_idle=not attempts.busy.is_set())
