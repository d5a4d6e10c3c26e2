"""A worker's load reports: paced while anything happens, none while nothing does."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.rpc.report_pace import QUIET_AFTER_S, ReportPace
from core.clock import ManualClock

pytestmark = pytest.mark.anyio

PERIOD_S = 0.001


async def test_reports_go_on_for_a_while_after_the_last_news() -> None:
    clock = ManualClock()
    pace = ReportPace(PERIOD_S, clock)
    clock.advance(QUIET_AFTER_S - 0.1)
    pace.stir()
    clock.advance(QUIET_AFTER_S - 0.1)
    async with asyncio.timeout(5.0):
        await pace.next(is_idle=True)


async def test_a_quiet_worker_reports_again_with_the_first_news() -> None:
    clock = ManualClock()
    pace = ReportPace(PERIOD_S, clock)
    clock.advance(QUIET_AFTER_S)
    waiting = asyncio.ensure_future(pace.next(is_idle=True))
    done, _ = await asyncio.wait({waiting}, timeout=50 * PERIOD_S)
    assert not done
    pace.stir()
    async with asyncio.timeout(5.0):
        await waiting
    async with asyncio.timeout(5.0):
        await pace.next(is_idle=True)  # and for a while after


async def test_work_under_way_is_reported_however_long_a_step_takes() -> None:
    clock = ManualClock()
    pace = ReportPace(PERIOD_S, clock)
    clock.advance(100.0)
    async with asyncio.timeout(5.0):
        await pace.next(is_idle=False)
