"""When a worker reports its load: at every heartbeat while anything happens, never while nothing
does. A load that was told holds until the next; streams have heartbeats of their own."""

from __future__ import annotations

import asyncio

from core.clock import Clock

QUIET_AFTER_S = 8.0
"""Without news before reports stop. Routers give up requests of which a worker has reported for 5 s
that it does not have them."""


class ReportPace:
    """Used on the loop's thread alone.

    Args:
        period_s: between two reports.
    """

    def __init__(self, period_s: float, clock: Clock) -> None:
        self._period_s = period_s
        self._clock = clock
        self._news_at = clock.now()
        self._news = asyncio.Event()

    def stir(self) -> None:
        """Something happened that may change the load."""
        self._news_at = self._clock.now()
        self._news.set()

    async def next(self, *, is_idle: bool) -> None:
        """Return when it is time for the next report.

        Args:
            is_idle: no work is under way that could change the load without `stir`.
        """
        if is_idle and self._clock.now() - self._news_at >= QUIET_AFTER_S:
            self._news.clear()
            await self._news.wait()
        await asyncio.sleep(self._period_s)  # after the news, which it shall not delay
