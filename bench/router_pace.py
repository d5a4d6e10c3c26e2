"""When mock workers send tokens: on a grid of the machine's monotonic clock, which every process of
this benchmark shares. So whoever receives a token knows how late it is, without a stamp in it."""

from __future__ import annotations

import asyncio

from core.clock import Clock

_EARLY_S = 0.0015
"""Event loops round to milliseconds."""


async def next_tick(pace_s: float, clock: Clock) -> None:
    """Return at the grid's next point; with `pace_s` 0, after the loop looked around once."""
    if pace_s == 0:
        await asyncio.sleep(0)
        return
    due = (clock.now() // pace_s + 1) * pace_s
    await asyncio.sleep(max(0.0, due - clock.now() - _EARLY_S))
    while clock.now() < due:  # noqa: ASYNC110 - there is no event: it waits for the clock
        await asyncio.sleep(0)


def lateness_s(pace_s: float, now: float) -> float:
    """Return the time since the grid's last point."""
    return now % pace_s
