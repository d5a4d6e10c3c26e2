"""deploy.process_end: the first reason wins, and no part of a process dies unheard."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator

import pytest

from deploy.process_end import ProcessEnd

pytestmark = pytest.mark.anyio

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture
async def end() -> AsyncIterator[ProcessEnd]:
    yield ProcessEnd()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.remove_signal_handler(number)


async def for_ever() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    """A part that should have run on."""


async def broken() -> None:
    msg = "nobody expected it"
    raise LookupError(msg)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_ends_it_in_order(end: ProcessEnd, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    await end.wait()
    assert end.is_hurried == (number is not signal.SIGTERM)


async def test_one_that_is_ending_can_be_hurried(end: ProcessEnd) -> None:
    end.stop()
    await end.wait()
    assert not end.is_hurried
    end.hurry()
    assert end.is_hurried


async def test_a_part_that_fails_ends_it_with_its_error(end: ProcessEnd) -> None:
    end.must_run(asyncio.create_task(broken()))
    with pytest.raises(LookupError, match="nobody expected it"):
        await end.wait()


async def test_a_part_that_just_returns_ends_it_too(end: ProcessEnd) -> None:
    end.must_run(asyncio.create_task(at_once(), name="http server"))
    with pytest.raises(RuntimeError, match="http server ended by itself"):
        await end.wait()


async def test_parts_of_a_process_that_could_not_start_end_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    end = ProcessEnd()
    task = asyncio.create_task(at_once(), name="http server")
    end.must_run(task)
    await asyncio.wait({task})
    await asyncio.sleep(0)  # its callback
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.remove_signal_handler(number)
    del end, task
    gc.collect()
    assert caplog.records == []


async def test_after_a_signal_parts_may_end(
    end: ProcessEnd, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [asyncio.create_task(work()) for work in (at_once, for_ever)]
    end.stop()
    for task in tasks:
        end.must_run(task)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await end.wait()
    assert caplog.records == []


async def test_a_second_failure_is_logged(
    end: ProcessEnd, caplog: pytest.LogCaptureFixture
) -> None:
    end.fail(LookupError("the first"))
    end.fail(OSError("the second"))
    with pytest.raises(LookupError, match="the first"):
        await end.wait()
    assert "the second" in caplog.text


async def test_what_is_wanted_comes_or_the_end_comes_first(end: ProcessEnd) -> None:
    assert await end.comes_after(at_once())
    waiting = asyncio.create_task(end.comes_after(for_ever()))
    await asyncio.sleep(0)
    end.stop()
    assert not await waiting
