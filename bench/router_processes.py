"""The processes of the router's benchmark: routers on one core, all others on another.

core 0   the router that is measured (the others are idle)
core 1   mock workers, etcd, and this process, whose client asks
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil

from bench.router_workers import MODEL
from control_plane.etcd.embedded import EmbeddedEtcd
from core.clock import SystemClock
from core.environment import child_environment

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / ".venv-peers" / "bin"
"""An environment with vllm-router and uvicorn: `make bench-peers`."""

_START_S = 30.0
_clock = SystemClock()


class Target(msgspec.Struct, frozen=True):
    """A router that is measured, and a worker behind it.

    Attributes:
        port: of its API.
        worker: host:port of the worker that generates.
    """

    name: str
    port: int
    pid: int
    worker: str
    model: str = MODEL

    def cpu_s(self) -> float:
        """Return the processor time that it has used, in seconds."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system


@contextlib.contextmanager
def two_cores() -> Generator[tuple[int, int]]:
    """Keep this process on the second of two cores; yield both.

    Raises:
        RuntimeError: there is one only.
    """
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        msg = "the router's benchmark needs two cores: routers on one, all others on the other"
        raise RuntimeError(msg)
    router, others = sorted(before)[:2]
    os.sched_setaffinity(0, {others})
    try:
        yield router, others
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def our_router(core: int) -> AsyncGenerator[Target]:
    """Run a router of this checkout with its mock workers and etcd."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        etcd = EmbeddedEtcd(directory / "etcd", log_path=directory / "etcd.log")
        await etcd.start()
        stack.push_async_callback(etcd.stop)
        worker = await stack.enter_async_context(
            _process([sys.executable, "-m", "bench.router_workers", etcd.endpoint])
        )
        address = (await _line(worker)).strip()
        command = [sys.executable, "-m", "deploy", "router", "--etcd", etcd.endpoint]
        options = ["--port", "0", "--log-level", "warning"]
        router = await stack.enter_async_context(_process([*command, *options], core=core))
        ready = await _line(router)
        port = int(ready.rsplit(":", 1)[1])
        await answers(port, path="/health/ready")  # its streams to the workers are open
        yield Target("dovetail", port, router.pid, address)


@asynccontextmanager
async def peer_router(core: int) -> AsyncGenerator[Target]:
    """Run vllm-router with a prefill and a decode upstream, joined as by its NIXL connector."""
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        log = stack.enter_context((Path(directory) / "log").open("wb"))
        prefill, decode, port, metrics = (free_port() for _ in range(4))
        for upstream in (prefill, decode):
            command = [str(PEER / "python"), "-m", "uvicorn", "bench.router_upstream:app"]
            options = ["--port", str(upstream), "--log-level", "warning", "--no-access-log"]
            await stack.enter_async_context(_process([*command, *options], output=log.fileno()))
            await answers(upstream)
        command = [str(PEER / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        command += ["--prefill", f"http://127.0.0.1:{prefill}"]
        command += ["--decode", f"http://127.0.0.1:{decode}", "--policy", "round_robin"]
        command += ["--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error"]
        router = await stack.enter_async_context(_process(command, core=core, output=log.fileno()))
        await answers(port)
        yield Target("vllm_router", port, router.pid, f"127.0.0.1:{decode}")


@asynccontextmanager
async def _process(
    command: Sequence[str], *, core: int | None = None, output: int = subprocess.PIPE
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run a child: on `core`, or where this process runs. Threads inherit it, so it is set before
    the child has any."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ours if core is None else {core})
    try:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=child_environment(), stdout=output
        )
    finally:
        os.sched_setaffinity(0, ours)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(_START_S):
        line = await process.stdout.readline()
    if not line:
        msg = f"process {process.pid} ended before it was ready"
        raise RuntimeError(msg)
    return line.decode()


async def answers(port: int, within_s: float = _START_S, path: str = "/health") -> None:
    """Return once somebody answers requests there.

    Raises:
        RuntimeError: nobody does in time.
    """
    give_up = _clock.now() + within_s
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
            writer.write(head.encode())
            status = await reader.readline()
            writer.close()
        except OSError:
            status = b""
        if b" 200" in status:
            return
        if _clock.now() > give_up:
            msg = f"nobody answers on port {port}: {status!r}"
            raise RuntimeError(msg)
        await asyncio.sleep(0.1)


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
