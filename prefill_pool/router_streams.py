"""The routers' streams to a prefill worker: they carry its load, and requests only by mistake."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from msgspec.structs import replace

from control_plane.rpc.interface import Stream
from core.messages import RequestRefused, RouterToWorker, StartRequest, WorkerLoad

_log = logging.getLogger(__name__)


class RouterStreams:
    """`StreamListener[RouterToWorker]` of a worker whose role serves no whole request."""

    def __init__(self) -> None:
        self._streams: set[Stream[Any]] = set()
        self._has_streams = asyncio.Event()
        self._load: WorkerLoad | None = None
        self._is_draining = False

    def tell(self, load: WorkerLoad) -> None:
        """Send the load to every router, and to those that come before the next one."""
        self._load = replace(load, is_draining=self._is_draining)
        for stream in self._streams:
            stream.send(self._load)

    async def wait_for_one(self) -> None:
        """Return once there is a router to tell."""
        await self._has_streams.wait()

    def drain(self, *, is_draining: bool) -> None:
        """Have routers hear at once whether new work is taken."""
        self._is_draining = is_draining
        if self._load is not None:
            self.tell(self._load)

    def on_open(self, stream: Stream[Any]) -> None:
        """A router connected: it learns the load at once."""
        self._streams.add(stream)
        self._has_streams.set()
        if self._load is not None:
            stream.send(self._load)

    def on_message(self, stream: Stream[Any], message: RouterToWorker) -> None:
        """Refuse a request that a router with an old view sent here."""
        if isinstance(message, StartRequest):
            refused = RequestRefused(
                message.request.request_id,
                message.dispatch,
                "wrong_role",
                "this worker computes prompts only",
            )
            stream.send(refused)

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        """Nothing here depends on a router."""

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        """A router left."""
        _log.info("router %s left: %s", stream.peer.name, reason)
        self._streams.discard(stream)
        if not self._streams:
            self._has_streams.clear()
