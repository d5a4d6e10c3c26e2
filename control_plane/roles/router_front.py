"""Routers' streams to a worker: orders to the process, all else to the pool whose role it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from control_plane.rpc.interface import Stream, StreamListener
from core.messages import DrainWorker, RouterToWorker, SwitchRole, WorkerOrder

OnOrder = Callable[[WorkerOrder], None]


class RouterFront:
    """`StreamListener[RouterToWorker | WorkerOrder]`; `hand_to` comes before the first stream."""

    def __init__(self, on_order: OnOrder) -> None:
        self._on_order = on_order
        self._streams: set[Stream[Any]] = set()
        self._pool: StreamListener[RouterToWorker]

    def hand_to(self, pool: StreamListener[RouterToWorker]) -> None:
        """Give all streams, and those to come, to another pool."""
        before = self._pool if self._streams else pool
        self._pool = pool
        if before is pool:
            return
        for stream in self._streams:
            before.on_closed(stream, "another pool has it now")
            pool.on_open(stream)

    def on_open(self, stream: Stream[Any]) -> None:
        """A router connected."""
        self._streams.add(stream)
        self._pool.on_open(stream)

    def on_message(self, stream: Stream[Any], message: RouterToWorker | WorkerOrder) -> None:
        """An order, or a word on a request."""
        if isinstance(message, DrainWorker | SwitchRole):
            self._on_order(message)
        else:
            self._pool.on_message(stream, message)

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        """Heartbeats stopped, or came back."""
        self._pool.on_suspect(stream, suspect=suspect)

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        """A router left."""
        self._streams.discard(stream)
        self._pool.on_closed(stream, reason)
