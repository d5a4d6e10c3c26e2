"""A connection of two processes: what is sent on it arrives in order, each message after a delay of
its own, and the end of a process or of the connection is seen after what arrived before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from control_plane.rpc.interface import StreamListener
from core.worker_record import Hello
from planner.protocol.event_log import EventLog
from planner.protocol.process import Lane, Process
from planner.protocol.virtual_loop import VirtualLoop


class Medium(Protocol):
    """What connections go through; `network.Network`."""

    @property
    def loop(self) -> VirtualLoop:
        """Where messages are events."""
        ...

    @property
    def log(self) -> EventLog:
        """Where they are noted."""
        ...

    def delay_s(self) -> float:
        """Draw how long a message takes."""
        ...

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing gets from `source` to `target`."""
        ...


class _Closing(NamedTuple):
    """The last that arrives on a pipe."""

    reason: str


class _Due(NamedTuple):
    at: float
    item: Any


class Pipe:
    """One direction of a connection.

    Attributes:
        source, target: names of the processes' kinds, as partitions know them.
    """

    def __init__(self, network: Medium, source: Process, end: SimStream) -> None:
        self.source = source
        self.end = end
        self._network = network
        self._queue: deque[_Due] = deque()
        self._last_due = 0.0
        self._num_stalled = 0
        self._is_ending = False

    @property
    def route(self) -> tuple[str, str]:
        """Names of sender and receiver."""
        return self.source.name, self.end.process.name

    def send(self, message: Any) -> None:
        """Put a message on its way, unless the pipe ends."""
        if not self._is_ending:
            self._push(message, self._network.delay_s())

    def end_with(self, reason: str, *, delay_s: float) -> None:
        """Send nothing after this; the receiver sees the end `delay_s` from now, or later."""
        if not self._is_ending:
            self._is_ending = True
            self._push(_Closing(reason), delay_s)

    def lose(self, num_kept: int, late_s: float) -> None:
        """Lose all but the first messages that are under way, which come late. A pipe that ends
        already loses no more: its end must be seen."""
        if self._is_ending:
            return
        kept = [_Due(due.at + late_s, due.item) for due in self._queue][:num_kept]
        self._queue = deque(kept)
        for due in kept:
            self._schedule(due.at)
        if kept:
            self._last_due = max(self._last_due, kept[-1].at)

    @property
    def busy_s(self) -> float:
        """Seconds until the last of what is under way arrives."""
        return max(0.0, self._last_due - self._network.loop.time())

    @property
    def num_under_way(self) -> int:
        """Messages that have not arrived."""
        return len(self._queue)

    def resume(self) -> None:
        """The route is open again."""
        for _ in range(self._num_stalled):
            self._schedule(self._network.loop.time() + self._network.delay_s())
        self._num_stalled = 0

    def _push(self, item: Any, delay_s: float) -> None:
        due = self._last_due = max(self._last_due, self._network.loop.time() + delay_s)
        self._queue.append(_Due(due, item))
        self._schedule(due)

    def _schedule(self, when: float) -> None:
        self._network.loop.call_in(self.end.process, Lane.MESSAGE, when, self._arrive)

    def _arrive(self) -> None:
        if self._network.is_cut(*self.route):
            self._num_stalled += 1
            return
        # What was truncated had an event too; those left over find nothing that is due.
        if self._queue and self._queue[0].at <= self._network.loop.time():
            item = self._queue.popleft().item
            if isinstance(item, _Closing):
                self.end.ended(item.reason)
            else:
                self.end.receive(item)


class SimStream:
    """One end: `control_plane.rpc.interface.Stream` for the process that it belongs to."""

    def __init__(
        self,
        network: Medium,
        process: Process,
        peer: Hello,
        listener: StreamListener[Any],
        serial: int,
    ) -> None:
        self.process = process
        self.inbound: Pipe
        self.outbound: Pipe
        self.is_suspect = False
        self.is_closed = False
        self._network = network
        self._peer = peer
        self._listener = listener
        self._serial = serial
        self._is_open = False
        self._early: list[Callable[[], None]] = []

    def __hash__(self) -> int:
        """Equal in every run, so that sets of streams have one order."""
        return self._serial

    @property
    def peer(self) -> Hello:
        """What the other end said first."""
        return self._peer

    def send(self, message: Any) -> None:
        """Put a message on its way; dropped where the stream has ended."""
        if not self.is_closed:
            self._network.log.add(str(self.process), f"-> {self._peer.name}", message)
            self.outbound.send(message)

    def close(self, reason: str = "") -> None:
        """End both directions; the listener hears of it once, soon."""
        if self.is_closed:
            return
        reason = reason or "closed here"
        self.is_closed = True
        loop = self._network.loop
        loop.call_in(self.process, Lane.MESSAGE, loop.time(), self._tell_closed, reason)
        self.outbound.end_with(f"closed by the peer: {reason}", delay_s=self._network.delay_s())

    # --- what the network does --------------------------------------------------------------------

    def opened(self) -> None:
        """The handshake is done: tell the listener, and what came meanwhile."""
        self._is_open = True
        if not self.is_closed:
            self._listener.on_open(self)
        early, self._early = self._early, []
        for tell in early:
            tell()

    def receive(self, message: Any) -> None:
        """A message arrived."""
        if not self._is_open:
            self._early.append(lambda: self.receive(message))
            return
        if self.is_closed:
            return
        self.heard()
        self._network.log.add(str(self.process), f"<- {self._peer.name}", message)
        self._listener.on_message(self, message)

    def ended(self, reason: str) -> None:
        """The peer, or the connection, is gone."""
        if not self._is_open:
            self._early.append(lambda: self.ended(reason))
            return
        if not self.is_closed:
            self.is_closed = True
            self.outbound.end_with("the peer saw the end", delay_s=self._network.delay_s())
            self._tell_closed(reason)

    def fell_silent(self) -> None:
        """No heartbeat came for `suspect_s`."""
        if self._is_open and not self.is_closed and not self.is_suspect:
            self._network.log.add(str(self.process), f"suspects {self._peer.name}")
            self.is_suspect = True
            self._listener.on_suspect(self, suspect=True)

    def heard(self) -> None:
        """Something came from the peer."""
        if self.is_suspect and not self.is_closed:
            self._network.log.add(str(self.process), f"hears {self._peer.name} again")
            self.is_suspect = False
            self._listener.on_suspect(self, suspect=False)

    def _tell_closed(self, reason: str) -> None:
        self._network.log.add(str(self.process), f"lost {self._peer.name}", reason)
        self._listener.on_closed(self, reason)
