"""How soon things are there, and what a cluster costs that nobody uses."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.cluster import START_S, cluster
from bench.figures import Figure, figure
from control_plane.etcd.embedded import EmbeddedEtcd
from core.clock import SystemClock
from core.environment import child_environment

HELP_AIM_S = 0.3
ROUTER_AIM_S = 1.5
UP_AIM_S = 10.0
IDLE_AIM_PERCENT = 2.0
IDLE_S = 10.0
ROUNDS = 5
UP_ROUNDS = 3

_ROOT = Path(__file__).resolve().parent.parent
_REST_S = 10.0
"""Workers report their load for 8 s after the last news, and touch the pages of their pools while
they serve already, from some moment on: a shorter look may fall before that."""

_SETTLED_PERCENT = 10.0
_SETTLING_S = 60.0

_clock = SystemClock()


def run() -> Iterator[Figure]:
    """Yield each start's time, then the idle cluster's processor time."""
    help_s = [_seconds_of("--help") for _ in range(ROUNDS)]
    yield figure("start.help", help_s, "s", at_most=HELP_AIM_S)
    router_s = asyncio.run(_router_starts())
    yield figure("start.router", router_s, "s", against="etcd there", at_most=ROUTER_AIM_S)
    up_s: list[float] = []
    idle: list[dict[str, float]] = []
    for _ in range(UP_ROUNDS):
        started = _clock.now()
        with cluster(["--prefill", "1", "--decode", "1"]):
            up_s.append(_clock.now() - started)
            idle.append(_idle_percent())
    what = "1 prefill, 1 decode, default model, first request answered"
    yield figure("start.up", up_s, "s", against=what, at_most=UP_AIM_S)
    yield figure(
        "start.idle",
        [sum(percent.values()) for percent in idle],
        "% of a core",
        against=f"all processes, over {IDLE_S:g} s",
        at_most=IDLE_AIM_PERCENT,
    )
    for name in sorted(idle[0]):
        yield figure(f"start.idle.{name}", [percent[name] for percent in idle], "% of a core")


def _seconds_of(*arguments: str) -> float:
    started = _clock.now()
    subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "deploy", *arguments],
        cwd=_ROOT,
        env=child_environment(),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return _clock.now() - started


async def _router_starts() -> list[float]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        etcd = EmbeddedEtcd(path / "etcd", log_path=path / "etcd.log")
        await etcd.start()
        try:
            return [await _router_start(etcd.endpoint) for _ in range(ROUNDS)]
        finally:
            await etcd.stop()


async def _router_start(etcd: str) -> float:
    started = _clock.now()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy", "router", "--etcd", etcd, "--port", "0"),
        cwd=_ROOT,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        if b" ready " not in line:
            msg = f"the router did not become ready: {line!r}"
            raise RuntimeError(msg)
        return _clock.now() - started
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def _idle_percent() -> dict[str, float]:
    """Return the processor time of each process of the one running cluster."""
    give_up = _clock.now() + _SETTLING_S
    while sum(_percent_over(_REST_S).values()) > _SETTLED_PERCENT and _clock.now() < give_up:
        continue
    return _percent_over(IDLE_S)


def _percent_over(seconds: float) -> dict[str, float]:
    processes = {_name(process): process for process in psutil.Process().children(recursive=True)}
    before = {name: _cpu_s(process) for name, process in processes.items()}
    time.sleep(seconds)
    return {
        name: 100 * (_cpu_s(process) - before[name]) / seconds
        for name, process in processes.items()
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _name(process: psutil.Process) -> str:
    command = process.cmdline()
    if command[0].endswith("etcd"):
        return "etcd"
    if "--id" in command:
        return command[command.index("--id") + 1]
    return next(word for word in command if word in ("router", "up"))
