"""The simulation's event loop: virtual time, processes that stand still or die, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from planner.protocol.process import Lane, Process
from planner.protocol.virtual_loop import VirtualLoop


class Traced:
    """A loop with one process, and what happened in it."""

    def __init__(self) -> None:
        self.errors: list[dict[str, Any]] = []
        self.loop = VirtualLoop(self.errors.append)
        self.process = Process("p", 1, clock_offset=0.0)
        self.happened: list[tuple[float, str]] = []

    def at(self, when: float, name: str, lane: Lane = Lane.LOOP) -> None:
        self.loop.call_in(self.process, lane, when, self.note, name)

    def note(self, name: str) -> None:
        self.happened.append((self.loop.time(), name))


def test_time_jumps_from_event_to_event_and_ends_where_it_was_told_to() -> None:
    traced = Traced()
    traced.at(2.0, "later")
    traced.at(1.0, "sooner")
    traced.at(9.0, "never")
    traced.loop.run_until(5.0)
    assert traced.happened == [(1.0, "sooner"), (2.0, "later")]
    assert traced.loop.time() == 5.0
    traced.loop.tear_down([traced.process])


def test_tasks_sleep_in_virtual_time() -> None:
    traced = Traced()

    async def sleep() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.sleep(1000)
        traced.note("slept")

    traced.loop.create_task(sleep(), context=traced.process.context)
    traced.loop.run_until(500.0)
    assert traced.happened == [(100.0, "slept")]
    traced.loop.tear_down([traced.process])


def test_what_comes_due_in_a_frozen_process_waits_and_keeps_its_order_in_a_lane() -> None:
    traced = Traced()
    traced.loop.freeze(traced.process)
    for name in ("a", "b"):
        traced.at(1.0, name)
        traced.at(1.0, name.upper(), Lane.MESSAGE)
    traced.loop.run_until(2.0)
    assert traced.happened == []
    traced.loop.thaw(traced.process, {Lane.MESSAGE: 0.5})
    traced.loop.run_until(3.0)
    assert traced.happened == [(2.0, "a"), (2.0, "b"), (2.5, "A"), (2.5, "B")]
    traced.loop.tear_down([traced.process])


def test_nothing_happens_in_a_dead_process() -> None:
    traced = Traced()
    traced.at(1.0, "too late")
    traced.loop.kill(traced.process)
    traced.loop.run_until(2.0)
    assert traced.happened == []
    traced.loop.tear_down([traced.process])


def test_what_the_world_does_belongs_to_no_process() -> None:
    """Also where a process's code asked for it: its death must not stop the hardware."""
    traced = Traced()
    later = 1.0
    traced.loop.call_in(
        traced.process,
        Lane.LOOP,
        0.0,
        lambda: traced.loop.call_world(later, traced.note, "lands"),
    )
    traced.loop.run_until(0.5)
    traced.loop.kill(traced.process)
    traced.loop.run_until(2.0)
    assert traced.happened == [(1.0, "lands")]
    traced.loop.tear_down([traced.process])


def test_a_failing_callback_is_told_and_a_halted_loop_does_nothing_more() -> None:
    traced = Traced()

    def fail() -> None:
        msg = "on purpose"
        raise ValueError(msg)

    traced.loop.call_at(1.0, fail)
    traced.loop.call_at(2.0, traced.loop.halt)
    traced.at(3.0, "after the end")
    traced.loop.call_soon_threadsafe(traced.note, "first")
    traced.loop.run_until(4.0)
    traced.loop.run_until(5.0)
    assert [str(error["exception"]) for error in traced.errors] == ["on purpose"]
    assert traced.happened == [(0.0, "first")]
    traced.loop.tear_down([traced.process])


def test_the_end_cancels_tasks_of_dead_processes_and_lets_no_message_in() -> None:
    traced = Traced()
    cleaned: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            cleaned.append("up")

    traced.loop.create_task(wait(), context=traced.process.context)
    traced.loop.run_until(1.0)
    traced.loop.kill(traced.process)
    traced.at(2.0, "a message", Lane.MESSAGE)
    traced.loop.tear_down([traced.process])
    assert cleaned == ["up"]
    assert traced.happened == []


def test_the_end_names_a_task_that_does_not_end() -> None:
    traced = Traced()
    is_over = False

    async def stubborn() -> None:
        while not is_over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)

    task = traced.loop.create_task(stubborn(), name="stubborn", context=traced.process.context)
    traced.loop.run_until(1.0)
    with pytest.raises(RuntimeError, match=r"do not end when they are cancelled: .*stubborn"):
        traced.loop.tear_down([traced.process])
    is_over = True
    traced.loop.tear_down([traced.process])
    assert task.done()
