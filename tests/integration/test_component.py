"""deploy.launcher.component: one child process, without a launcher around it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest

from core.clock import SystemClock
from deploy.launcher import component as module
from deploy.launcher.component import Component, StartFailure, describe_exit
from deploy.launcher.plan import ComponentSpec

pytestmark = pytest.mark.anyio

READY = """
import os, signal, sys
from deploy.readiness import Readiness, announce
print("on stdout", flush=True)
print("on stderr", file=sys.stderr, flush=True)
signal.signal(signal.SIGTERM, signal.{term})
announce(int(sys.argv[-1]), Readiness("c", os.getpid(), "a"))
signal.pause()
"""
SILENT = "import signal; signal.pause()"

Make = Callable[..., Component]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Component] = []

    def maker(script: str, log_file: Path | None = None) -> Component:
        spec = ComponentSpec("c", (sys.executable, "-P", "-c", script))
        made.append(Component(spec, clock=SystemClock(), rng=Random(1), log_file=log_file))
        return made[-1]

    yield maker
    for component in made:
        component.kill()
        await component.stop(5.0)


async def run_until_ready(component: Component) -> asyncio.Task[None]:
    task = asyncio.create_task(component.keep_alive())
    await asyncio.wait_for(component.ready.wait(), 10)
    return task


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_log_file_gets_both_streams(make: Make, tmp_path: Path) -> None:
    component = make(READY.format(term="SIG_DFL"), tmp_path / "c.log")
    await cancel(await run_until_ready(component))
    await component.stop(5.0)
    assert (tmp_path / "c.log").read_text() == "on stdout\non stderr\n"


async def test_child_that_ignores_sigterm_is_killed_after_its_grace(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    component = make(READY.format(term="SIG_IGN"))
    await cancel(await run_until_ready(component))
    await component.stop(0.1)
    captured = capfd.readouterr()
    assert "c did not stop within 0.1 s and is killed" in captured.err
    assert "on stdout" in captured.err, "stdout carries the launcher's own lines only"
    assert "on stdout" not in captured.out


async def test_silent_child_is_killed_when_its_time_is_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.3)
    with pytest.raises(StartFailure, match=r"not ready within 0\.3 s"):
        await make(SILENT).keep_alive()


async def test_cancelled_start_leaves_a_child_that_can_be_stopped(make: Make) -> None:
    component = make(SILENT)
    task = asyncio.create_task(component.keep_alive())
    await asyncio.sleep(0)
    await cancel(task)
    await component.stop(5.0)


async def test_failure_names_the_log(make: Make, tmp_path: Path) -> None:
    component = make("raise SystemExit(7)", tmp_path / "c.log")
    with pytest.raises(StartFailure, match=rf"\(exit code 7\); see {tmp_path}/c\.log"):
        await component.keep_alive()


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "SIGKILL"
    assert describe_exit(-77) == "signal 77"
