"""A worker's load, told on its routers' streams: to all at each report, to a new one at once."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from control_plane.rpc.interface import Stream
from core.messages import WorkerLoad


class LoadReports:
    """Used on the loop's thread alone."""

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

    def drain(self, *, is_draining: bool) -> None:
        """Have routers hear at once whether new work is taken."""
        self._is_draining = is_draining
        if self._load is not None:
            self.tell(self._load)

    async def wait_for_router(self) -> None:
        """Return once there is a router to tell."""
        await self._has_streams.wait()

    def opened(self, stream: Stream[Any]) -> None:
        """A router connected: it learns the load at once."""
        self._streams.add(stream)
        self._has_streams.set()
        if self._load is not None:
            stream.send(self._load)

    def closed(self, stream: Stream[Any]) -> None:
        """A router left."""
        self._streams.discard(stream)
        if not self._streams:
            self._has_streams.clear()
