"""The router's end of one worker's life: its stream, kept open, and what it said last.

connecting --on_open--> live <--heartbeats stop, come back--> suspect
    ^                    |                                       |
    +----- back-off -----+---------------- on_closed ------------+
live, and its worker says that it drains: draining (sent to no more)
any state --drop()--> gone (another boot, or its key is gone and so are its heartbeats)
"""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import Any, Protocol

import msgspec

from control_plane.rpc.interface import Stream, StreamListener
from core.back_off import BackOff, Dice
from core.clock import Clock
from core.config import ControlPlaneConfig
from core.errors import PeerError, ProtocolMismatch
from core.ids import RequestId
from core.messages import (
    DrainWorker,
    RouterToWorker,
    SwitchRole,
    WorkerLoad,
    WorkerOrder,
    WorkerToRouter,
)
from core.worker_record import Hello, Role, WorkerRecord
from router.dispatch.pending_work import PendingWork
from router.dispatch.recent_preemptions import RecentPreemptions
from router.policy.views import WorkerView

FIRST_WAIT_S = 0.05
MAX_WAIT_S = 2.0

_log = logging.getLogger(__name__)


class Connect(Protocol):
    """`control_plane.rpc.client.connect`."""

    async def __call__(
        self,
        address: str,
        hello: Hello,
        listener: StreamListener[Any],
        *,
        config: ControlPlaneConfig,
        clock: Clock,
    ) -> Stream[Any]:
        """Open a stream; `listener.on_open` has been called when this returns.

        Raises:
            PeerError: not reachable, or the handshake was refused.
        """
        ...


class LinkState(enum.StrEnum):
    """As `/status` shows it."""

    CONNECTING = "connecting"
    LIVE = "live"
    DRAINING = "draining"
    SUSPECT = "suspect"
    GONE = "gone"


class LinkOwner(Protocol):
    """Who is told what happens on a link; all calls come from the event loop."""

    def link_opened(self, link: WorkerLink) -> None:
        """It can be sent to."""
        ...

    def link_message(self, link: WorkerLink, message: WorkerToRouter) -> None:
        """One message of its worker."""
        ...

    def link_suspected(self, link: WorkerLink, *, suspect: bool) -> None:
        """Heartbeats stopped, or came back."""
        ...

    def link_lost(self, link: WorkerLink, reason: str) -> None:
        """The stream is gone; what was sent over it has been aborted by the worker, if it lives."""
        ...


class Dial(msgspec.Struct, frozen=True):
    """How streams are opened."""

    hello: Hello
    connect: Connect
    config: ControlPlaneConfig
    clock: Clock
    dice: Dice


class WorkerLink:
    """One (worker id, boot). Its `run` must be running; it ends by `drop` or cancellation.

    Attributes:
        is_open: whether messages can be sent; a suspect link is open.
    """

    def __init__(self, record: WorkerRecord, owner: LinkOwner, dial: Dial) -> None:
        self.record = record
        self.is_registered = True
        self.load = WorkerLoad()
        self.pending = PendingWork()
        self.preemptions = RecentPreemptions()
        self.requests: set[RequestId] = set()
        self.idle_since: float | None = None
        self.is_open = False
        self.is_suspect = False
        self._owner = owner
        self._dial = dial
        self._stream: Stream[Any] | None = None
        self._closed = asyncio.Event()
        self._is_dropped = False
        self._back_off = BackOff(first_s=FIRST_WAIT_S, limit_s=MAX_WAIT_S)
        self._has_failed = False
        self._has_opened = False
        self._is_refused = False
        self.is_leaving = False
        self._ordered: Role | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def may_open(self) -> bool:
        """Whether it is, was or may come to be open: false once a first handshake was refused."""
        return self._has_opened or not self._is_refused

    @property
    def state(self) -> LinkState:
        """Where it stands in the diagram above."""
        if self._is_dropped:
            return LinkState.GONE
        if self._stream is None:
            return LinkState.CONNECTING if self.is_registered else LinkState.GONE
        if self.is_suspect:
            return LinkState.SUSPECT
        return LinkState.DRAINING if self.is_draining else LinkState.LIVE

    @property
    def is_draining(self) -> bool:
        """Whether its worker takes nothing new, as it or etcd says."""
        return self.load.is_draining or self.record.is_draining

    @property
    def lasting_role(self) -> Role | None:
        """What of its role it serves in now, and still will once it has obeyed its orders; None
        where that is nothing."""
        if not self.is_open or self.is_suspect or self.is_draining or self.is_leaving:
            return None
        role, ordered = self.record.role, self._ordered
        if ordered in (None, role):
            return role
        return None if Role.PREFILL in (role, ordered) else Role.DECODE

    def view(self) -> WorkerView:
        """Return what the policy sees."""
        record = self.record
        return WorkerView(
            worker_id=record.worker_id,
            boot=record.boot,
            role=record.role,
            address=record.address,
            layout=record.layout,
            block_size=record.block_size,
            block_bytes=record.block_bytes,
            max_model_len=record.max_model_len,
            load=self.load,
            pending_requests=len(self.pending),
            pending_tokens=self.pending.num_tokens,
            is_suspect=self.is_suspect,
            recent_preemptions=self.preemptions.count,
        )

    def take_load(self, load: WorkerLoad, now: float) -> None:
        """Believe what the worker says of itself now."""
        self.load = load
        self.pending.load_came(now)
        self.preemptions.told(load.preemptions, now)

    def take_record(self, record: WorkerRecord) -> bool:
        """Believe what the worker registered now; return whether its role is another one."""
        is_changed = self.record.role is not record.role
        self.record = record
        self.is_registered = True
        if is_changed:
            self._ordered = None  # obeyed, or another router's operator wants something else
        return is_changed

    def order(self, order: WorkerOrder) -> None:
        """Send an operator's order. What it will come to counts before the worker says so."""
        match order:
            case DrainWorker():
                self.is_leaving = True
            case SwitchRole(role):
                self._ordered = role
        self.send(order)

    def send(self, message: RouterToWorker | WorkerOrder) -> None:
        """Send, or drop where the stream is gone: its requests were told so already."""
        if self._stream is not None:
            self._stream.send(message)

    def spawn(self, group: asyncio.TaskGroup) -> None:
        """Start keeping the stream open, as a task of `group`."""
        name = f"link to {self.record.worker_id}"
        self._task = group.create_task(self.run(), name=name)

    def drop(self, reason: str) -> None:
        """Close for good; the owner has heard `link_lost` when this returns, if it was open."""
        self._is_dropped = True
        stream = self._stream
        self._lose(reason)
        if stream is not None:
            stream.close(reason)
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Connect, and connect again with back-off whenever the stream is lost."""
        while not self._is_dropped:
            try:
                await self._connect()
            except (PeerError, OSError) as error:
                level = logging.DEBUG if self._has_failed else logging.WARNING
                self._has_failed = True
                self._is_refused = isinstance(error, ProtocolMismatch)
                _log.log(level, "no stream to %s: %s", self.record.worker_id, error)
            else:
                await self._closed.wait()
            await asyncio.sleep(self._back_off.next_s(self._dial.dice))

    async def _connect(self) -> None:
        dial = self._dial
        hello = msgspec.structs.replace(dial.hello, expected_boot=self.record.boot)
        self._closed.clear()
        await dial.connect(self.record.address, hello, self, config=dial.config, clock=dial.clock)

    def _lose(self, reason: str) -> None:
        if self._stream is None:
            return
        self._stream = None
        self.is_open = self.is_suspect = False
        self.idle_since = None
        self.is_leaving, self._ordered = (
            False,
            None,
        )  # perhaps never heard; what the worker does it says itself
        self.load = WorkerLoad()
        self.pending.clear()
        self.preemptions = RecentPreemptions()
        self._closed.set()
        self._owner.link_lost(self, reason)

    # -- StreamListener --------------------------------------------------------------------------

    def on_open(self, stream: Stream[Any]) -> None:
        """The handshake is done."""
        if self._is_dropped:
            stream.close("the router dropped this worker")
            return
        self._stream = stream
        self.is_open = True
        self._has_failed = False
        self._has_opened = True
        self._back_off.reset()
        self._owner.link_opened(self)

    def on_message(self, stream: Stream[Any], message: WorkerToRouter) -> None:
        """One message; those of a stream that was dropped are not heard."""
        if stream is self._stream:
            self._owner.link_message(self, message)

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        """Heartbeats stopped, or came back."""
        if stream is self._stream:
            self.is_suspect = suspect
            self._owner.link_suspected(self, suspect=suspect)

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        """Closed by either side, or lost."""
        if stream is self._stream:
            self._lose(reason)
