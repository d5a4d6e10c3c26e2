"""Connections between processes, and what can happen to them: delay, loss, partition, silence.

Heartbeats are not sent: a stream's end suspects its peer when it would have missed them, because
the peer stands still or the way from it is cut. A dead process is seen by the end of its
connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from control_plane.rpc.handshake import difference
from control_plane.rpc.interface import StreamListener
from core.config import ControlPlaneConfig
from core.errors import PeerUnavailable, ProtocolMismatch
from core.worker_record import Hello
from kv_transfer.inprocess.model import Dice
from planner.protocol.connection import Pipe, SimStream
from planner.protocol.event_log import EventLog
from planner.protocol.process import Lane, Process
from planner.protocol.virtual_loop import VirtualLoop

CONNECT_S = 5.0
"""As `control_plane.rpc.client`: connection and handshake together."""


class Latency(msgspec.Struct, frozen=True):
    """Delays of messages, uniform; a share of them takes much longer."""

    max_s: float = 0.003
    slow_share: float = 0.03
    slow_max_s: float = 0.15


class Server(msgspec.Struct, frozen=True):
    """Who listens at an address."""

    process: Process
    hello: Callable[[], Hello]
    listeners: dict[str, StreamListener[Any]]


class _Opening(msgspec.Struct, eq=False):
    """A connection that is not answered yet."""

    server: Process
    opener: Process
    answer: asyncio.Future[SimStream]


class Network:
    """All connections. Partitions are between names, so they outlive a process."""

    def __init__(
        self,
        loop: VirtualLoop,
        dice: Dice,
        log: EventLog,
        config: ControlPlaneConfig,
        latency: Latency,
    ) -> None:
        self.loop = loop
        self.log = log
        self._dice = dice
        self._config = config
        self._latency = latency
        self._servers: dict[str, Server] = {}
        self._openings: list[_Opening] = []
        self._ends: list[SimStream] = []
        self._cuts: dict[tuple[str, str], float] = {}
        self._num_streams = 0

    def delay_s(self) -> float:
        """Draw how long a message takes."""
        latency = self._latency
        is_slow = self._dice.random() < latency.slow_share
        return self._dice.uniform(0.0001, latency.slow_max_s if is_slow else latency.max_s)

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing gets from `source` to `target`."""
        return (source, target) in self._cuts

    # --- opening ----------------------------------------------------------------------------------

    def listen(self, address: str, server: Server) -> None:
        """Serve at an address, in place of whoever did before."""
        self._servers[address] = server

    async def connect(
        self, opener: Process, address: str, hello: Hello, listener: StreamListener[Any]
    ) -> SimStream:
        """Open a stream; `listener.on_open` has been called when this returns.

        Raises:
            PeerUnavailable: nobody listens, or no answer came within `CONNECT_S`.
            ProtocolMismatch: refused; the message names the difference.
        """
        await asyncio.sleep(self.delay_s())
        server = self._servers.get(address)
        if server is None or not server.process.is_alive:
            msg = f"{address}: connection refused"
            raise PeerUnavailable(msg)
        opening = _Opening(server.process, opener, self.loop.create_future())
        self._openings.append(opening)
        self.loop.call_in(
            server.process,
            Lane.MESSAGE,
            self.loop.time() + self.delay_s(),
            self._accept,
            server,
            opening,
            hello,
            listener,
        )
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = await opening.answer
        except TimeoutError as error:
            msg = f"{address} did not answer the handshake within {CONNECT_S} s"
            raise PeerUnavailable(msg) from error
        finally:
            self._openings.remove(opening)
        stream.opened()
        return stream

    def _accept(
        self, server: Server, opening: _Opening, hello: Hello, listener: StreamListener[Any]
    ) -> None:
        """In the server: shake hands."""
        opener = opening.opener
        if not opener.is_alive or self.is_cut(opener.name, server.process.name):
            return
        ours = server.hello()
        differing = difference(hello, ours)
        answer_at = self.loop.time() + self.delay_s()
        if differing is None and hello.kind not in server.listeners:
            differing = f"kind: {hello.kind!r} is not served"
        if differing is not None:
            refusal = ProtocolMismatch(differing)
            self.loop.call_in(opener, Lane.MESSAGE, answer_at, _fail, opening.answer, refusal)
            return
        here = self._end(opener, ours, listener)
        there = self._end(server.process, hello, server.listeners[hello.kind])
        here.outbound = there.inbound = Pipe(self, opener, there)
        there.outbound = here.inbound = Pipe(self, server.process, here)
        self.log.add(str(server.process), f"accepts {opener}")
        there.opened()
        self.loop.call_in(opener, Lane.MESSAGE, answer_at, self._answered, opening, here)

    def _answered(self, opening: _Opening, here: SimStream) -> None:
        """In the opener: it may have given up meanwhile."""
        if opening.answer.done():
            here.close("nobody waits for it any more")
        else:
            opening.answer.set_result(here)

    def _end(self, process: Process, peer: Hello, listener: StreamListener[Any]) -> SimStream:
        self._num_streams += 1
        end = SimStream(self, process, peer, listener, self._num_streams)
        self._ends = [known for known in self._ends if not known.is_closed]
        self._ends.append(end)
        return end

    # --- faults -----------------------------------------------------------------------------------

    def died(self, process: Process) -> None:
        """A process is gone: its connections end after what its kernel still sends of them."""
        for end in self._ends:
            if end.process is process and not end.is_closed:
                end.is_closed = True
                self._lose(end.outbound, "connection reset")
        for opening in self._openings:
            if opening.server is process:
                refusal = PeerUnavailable("connection reset")
                at = self.loop.time() + self.delay_s()
                self.loop.call_in(opening.opener, Lane.MESSAGE, at, _fail, opening.answer, refusal)

    def left(self, process: Process) -> None:
        """A process ends in order: what it said gets there."""
        for end in self._ends:
            if end.process is process:
                end.close("the worker stops")

    def reset(self, one: str, other: str) -> None:
        """Lose the connections between two names; either end sees that when it does, and may hear
        until then what was under way."""
        for end in self._ends:
            if not end.is_closed and {end.process.name, end.outbound.end.process.name} == {
                one,
                other,
            }:
                self._lose(end.outbound, "connection lost")

    def _lose(self, pipe: Pipe, reason: str) -> None:
        """Some of what is under way is lost, the rest comes late; some ends see that at once."""
        draw = self._dice.uniform
        pipe.lose(
            self._dice.randrange(pipe.num_under_way + 1),
            draw(0.0, 0.8 if self._dice.random() < 0.3 else 0.1),
        )
        seen_after_s = draw(0.0, 0.3 if self._dice.random() < 0.5 else 0.02)
        pipe.end_with(reason, delay_s=pipe.busy_s + seen_after_s)

    def cut(self, source: str, target: str) -> None:
        """Stop what goes from `source` to `target`, heartbeats too; nothing is lost."""
        self._cuts[source, target] = self.loop.time()
        self._watch_silence(lambda end: end.inbound.route == (source, target))

    def heal(self, source: str, target: str) -> None:
        """Undo `cut`."""
        self._cuts.pop((source, target), None)
        for end in self._ends:
            if end.inbound.route == (source, target):
                end.inbound.resume()
                self._hear(end)

    def froze(self, process: Process) -> None:
        """A process stands still; its kernel keeps its connections."""
        self._watch_silence(lambda end: end.inbound.source is process)

    def thawed(self, process: Process) -> None:
        """It goes on."""
        for end in self._ends:
            if end.inbound.source is process:
                self._hear(end)

    # --- silence ----------------------------------------------------------------------------------

    def _watch_silence(self, is_hit: Callable[[SimStream], bool]) -> None:
        for end in self._ends:
            if not end.is_closed and is_hit(end):
                self._look_after(end, self._config.suspect_s)

    def _look_after(self, end: SimStream, wait_s: float) -> None:
        at = self.loop.time() + wait_s + self._dice.uniform(0.0, self._config.heartbeat_s)
        self.loop.call_in(end.process, Lane.LOOP, at, self._check_silence, end)

    def _check_silence(self, end: SimStream) -> None:
        since = self._silent_since(end)
        if end.is_closed or since is None:
            return
        silent_s = self.loop.time() - since
        if silent_s > self._config.suspect_s:
            end.fell_silent()
        else:
            self._look_after(end, self._config.suspect_s - silent_s)

    def _silent_since(self, end: SimStream) -> float | None:
        """Return since when no heartbeat can have come; time in which the end's own process stood
        still does not count."""
        source = end.inbound.source
        cut_at = self._cuts.get(end.inbound.route)
        stops = [] if source.is_running else [source.stopped_at]
        if cut_at is not None:
            stops.append(cut_at)
        return max(min(stops), end.process.resumed_at) if stops else None

    def _hear(self, end: SimStream) -> None:
        at = self.loop.time() + self._dice.uniform(0.0, self._config.heartbeat_s)
        self.loop.call_in(end.process, Lane.MESSAGE, at, self._heartbeat, end)

    def _heartbeat(self, end: SimStream) -> None:
        if self._silent_since(end) is None:
            end.heard()


def _fail(answer: asyncio.Future[SimStream], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
