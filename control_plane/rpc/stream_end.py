"""One end of an open stream, the same on both sides: queue, heartbeats, orderly ending.

    send() -> queue -> writer task: one frame per loop tick -> gRPC
    gRPC -> reader task -> listener.on_message, in the order sent
    timer: a heartbeat when nothing else left (the opener answers the worker's instead), and the
        watch over the peer's silence

The stream ends once, whichever comes first: close(), the peer's closing frame, a lost connection
(a killed peer: at once), a queue over its bound, or bytes that cannot be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, Protocol

from control_plane.rpc import codec
from control_plane.rpc.beats import Beats
from control_plane.rpc.interface import StreamListener
from control_plane.rpc.peer_watch import PeerWatch
from core.clock import Clock
from core.config import ControlPlaneConfig
from core.shared_ticks import sleep_s
from core.worker_record import Hello

MAX_QUEUED_BYTES = 128 << 20
"""Bytes that wait for a peer which does not read; beyond it the stream is closed, since nothing
here may block and a peer so far behind is of no use. 250 prompts of 128k tokens, or 2.5 million
tokens."""

_FRAME_BYTES = 1 << 20
"""A tick that has more to say is split: one large frame would delay the tokens behind it."""

_FLUSH_S = 1.0
"""How long a closed stream may take to hand its last frames to the peer."""

_log = logging.getLogger(__name__)


class Wire(Protocol):
    """What grpc.aio's two ends have in common."""

    async def read(self) -> codec.Frame | None:
        """Return the next frame, None at the peer's orderly end.

        Raises:
            ConnectionError: the connection is lost.
            ValueError: what came is no frame.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Hand one frame to gRPC; returns when flow control has taken it.

        Raises:
            ConnectionError: the connection is lost.
        """
        ...


class StreamEnd:
    """Implements `control_plane.rpc.interface.Stream`. Lives in `open`, then `run`.

    Args:
        answers: this is the opener's end, whose heartbeats answer the other's.
    """

    def __init__(
        self,
        wire: Wire,
        peer: Hello,
        listener: StreamListener[Any],
        *,
        answers: bool,
        config: ControlPlaneConfig,
        clock: Clock,
    ) -> None:
        self._wire = wire
        self._peer = peer
        self._listener = listener
        self._clock = clock
        now, heartbeat_s, suspect_s = clock.now(), config.heartbeat_s, config.suspect_s
        self._watch = PeerWatch(heartbeat_s=heartbeat_s, suspect_s=suspect_s, now=now)
        self._beats = Beats(answers=answers, heartbeat_s=heartbeat_s, suspect_s=suspect_s, now=now)
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wake_writer = asyncio.Event()
        self._closing: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._abandoned = False

    def open(self) -> None:
        """Tell the listener; whoever calls this calls `run` next."""
        self._listener.on_open(self)

    @property
    def peer(self) -> Hello:
        """What the other end said first."""
        return self._peer

    @property
    def is_suspect(self) -> bool:
        """Whether heartbeats are missing."""
        return self._watch.is_suspect

    @property
    def is_closed(self) -> bool:
        """Whether the stream has ended or is ending; what is sent now is dropped."""
        return self._closing.done()

    def send(self, message: codec.AnyMessage) -> None:
        """Queue a message.

        Raises:
            ValueError, TypeError: a field outside of its wire type's range.
        """
        if self.is_closed:
            return
        data = codec.encode(message)
        self._queued_bytes += len(data)
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self._abandon(f"{self._peer.name} reads too slowly: {self._queued_bytes} bytes wait")
            return
        self._queue.append(data)
        self._wake_writer.set()

    def close(self, reason: str = "") -> None:
        """End the stream; what was sent before still leaves, within a second."""
        self._end(reason or "closed here")

    async def run(self) -> None:
        """Serve and end an opened stream; returns after `on_closed`. Cancelling ends it too."""
        reason = f"lost {self._peer.name}"
        tasks = [
            asyncio.ensure_future(part()) for part in (self._read, self._write, self._keep_time)
        ]
        try:
            await asyncio.wait([self._closing, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # a listener's own error: not ours to hide
            reason = self._closing.result()
            await self._say_goodbye(reason, *tasks[:2])
        except Exception as error:
            reason = f"failed here: {error!r}"
            raise
        finally:
            self._end(reason)
            self._queue.clear()
            for task in tasks:
                task.cancel()
            self._listener.on_closed(self, reason)  # before an await, which may be cancelled
            await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, reason: str) -> None:
        if not self._closing.done():
            self._closing.set_result(reason)
            self._wake_writer.set()

    def _abandon(self, reason: str) -> None:
        """End without trying to send what waits."""
        self._abandoned = True
        self._end(reason)

    async def _read(self) -> None:
        """Read until the peer ends, also when we have: an orderly end is seen by both."""
        while True:
            try:
                frame = await self._wire.read()
                messages = codec.messages_of(frame) if frame is not None else []
            except ConnectionError as error:
                return self._abandon(f"lost {self._peer.name}: {error}")
            except ValueError as error:
                return self._end(f"unreadable frame from {self._peer.name}: {error}")
            if frame is None:
                return self._abandon(f"{self._peer.name} ended the stream")
            now = self._clock.now()
            if self._watch.heard(now) and not self.is_closed:
                self._tell_suspect(suspect=False)
            for message in messages:
                if not self.is_closed:
                    self._listener.on_message(self, message)
            if self._beats.is_answer_due(now):
                self._beat()
            if frame.HasField("closing"):
                return self._abandon(f"closed by {self._peer.name}: {frame.closing}")

    async def _write(self) -> None:
        """Write until closed, and then what is queued."""
        while self._queue or not self.is_closed:
            await self._wake_writer.wait()
            if not self.is_closed:
                self._wake_writer.clear()
            while self._queue and not self._abandoned:
                data = self._next_frame()
                self._beats.sent(self._clock.now())
                try:
                    await self._wire.write(data)
                except ConnectionError as error:
                    return self._abandon(f"lost {self._peer.name}: {error}")
            if self._abandoned:
                return None
        return None

    def _next_frame(self) -> bytes:
        parts = [self._queue.popleft()]
        size = len(parts[0])
        while self._queue and size + len(self._queue[0]) <= _FRAME_BYTES:
            parts.append(self._queue.popleft())
            size += len(parts[-1])
        self._queued_bytes -= size
        return b"".join(parts)

    def _beat(self) -> None:
        """What waits in the queue will do as well."""
        if not self._queue and not self.is_closed:
            self._queue.append(codec.HEARTBEAT)
            self._wake_writer.set()

    async def _keep_time(self) -> None:
        while not self.is_closed:
            due_at = min(self._beats.due_at, self._watch.look_at)
            await asyncio.sleep(sleep_s(due_at, self._clock.now()))
            now = self._clock.now()
            if self._beats.take_due(now):
                self._beat()
            if now >= self._watch.look_at and self._watch.check(now) and not self.is_closed:
                self._tell_suspect(suspect=True)

    def _tell_suspect(self, *, suspect: bool) -> None:
        level = logging.WARNING if suspect else logging.INFO
        state = "are missing" if suspect else "came back"
        _log.log(level, "heartbeats of %s %s", self._peer.name, state)
        self._listener.on_suspect(self, suspect=suspect)

    async def _say_goodbye(
        self, reason: str, reader: asyncio.Future[None], writer: asyncio.Future[None]
    ) -> None:
        """Hand over what is queued and the reason, and wait until the peer ends too: ending a
        gRPC call at once may take back what was written last."""
        if self._abandoned:
            return
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_FLUSH_S):
                await writer
                await self._wire.write(codec.encode_closing(reason))
                await reader
