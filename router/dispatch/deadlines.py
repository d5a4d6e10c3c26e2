"""Wakes whoever is due: one task for the timers of all requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from core.clock import Clock
from core.ids import RequestId
from router.dispatch.timers import Timers


class Deadlines:
    """Due times by request; `run` calls `on_due` with each request whose time has come."""

    def __init__(self, clock: Clock, on_due: Callable[[RequestId], None]) -> None:
        self._clock = clock
        self._on_due = on_due
        self._timers: Timers[RequestId] = Timers()
        self._changed = asyncio.Event()

    def set(self, request_id: RequestId, due: float) -> None:
        """Set or move a request's due time."""
        if self._timers.set(request_id, due):
            self._changed.set()

    def discard(self, request_id: RequestId) -> None:
        """Forget a request."""
        self._timers.discard(request_id)

    async def run(self) -> None:
        """Sleep until the next is due, for ever."""
        while True:
            self._changed.clear()
            due = self._timers.next_due()
            wait_s = None if due is None else max(0.0, due - self._clock.now())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            for request_id in self._timers.pop_due(self._clock.now()):
                self._on_due(request_id)
