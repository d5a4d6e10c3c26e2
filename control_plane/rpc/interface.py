"""Streams as both ends see them: typed messages, batched per event-loop tick, watched by
heartbeats.

One bidirectional stream per (router, worker) and per (decode worker, prefill worker). Each begins
with `Hello` both ways; a mismatch is refused with the difference named. All methods and callbacks
run on the asyncio loop; callbacks are plain functions that must not block.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from core.worker_record import Hello

OutT_contra = TypeVar("OutT_contra", contravariant=True)
InT_contra = TypeVar("InT_contra", contravariant=True)


class Stream(Protocol[OutT_contra]):
    """One end of an open stream."""

    @property
    def peer(self) -> Hello:
        """What the other end said first."""
        ...

    @property
    def is_suspect(self) -> bool:
        """Whether heartbeats are missing (`suspect_s`); it may yet come back."""
        ...

    def send(self, message: OutT_contra) -> None:
        """Queue a message; all messages of one loop tick leave in one gRPC message. Never blocks.
        On a closed stream the message is dropped: `on_closed` has told so already."""
        ...

    def close(self, reason: str = "") -> None:
        """End the stream; `on_closed` follows once."""
        ...


class StreamListener(Protocol[InT_contra]):
    """Whoever owns the streams of one kind. Typed by the messages that arrive."""

    def on_open(self, stream: Stream[Any]) -> None:
        """The handshake is done."""
        ...

    def on_message(self, stream: Stream[Any], message: InT_contra) -> None:
        """One message, in the order sent."""
        ...

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        """Heartbeats stopped, or came back."""
        ...

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        """Closed by either side or lost; no other callback of this stream follows."""
        ...
