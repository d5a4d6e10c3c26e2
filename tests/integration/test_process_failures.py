"""A router and a worker, each a real process, around an etcd that comes late, and with a part that
fails: they wait and serve, or end loudly with exit code 1 for whoever starts them again."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from control_plane.etcd.embedded import EmbeddedEtcd
from tests.launched import Launched

pytestmark = pytest.mark.anyio

COMMANDS = {
    "router": ("router", "--port", "0"),
    "worker": (
        *("worker", "--role", "prefill", "--id", "w0", "--executor", "mock"),
        *("--set", "engine.kv_memory=1000000"),
    ),
}

BREAK = {
    "the router's view": (
        "router",
        "from router.dispatch.dispatcher import RouterDispatcher as broken\n"
        "broken.on_worker_change = fail",
    ),
    "the registration": (
        "worker",
        "import control_plane.registration as broken\nbroken.ensure_world = fail",
    ),
    "the worker's HTTP server": (
        "worker",
        "from router.web.server import ApiServer as broken\nbroken.wait = fail",
    ),
}

PROGRAM = """
import sys

def fail(*args, **kwargs):
    raise LookupError("nobody expected it")

{change}
from deploy.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Start(Protocol):
    def __call__(self, kind: str, etcd: str, change: str = "") -> Launched: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def starter(kind: str, etcd: str, change: str = "") -> Launched:
            program = [sys.executable, "-c", PROGRAM.format(change=change)]
            command = [*program, *COMMANDS[kind], "--etcd", etcd]
            return stack.enter_context(Launched(command, tmp_path / f"tmp-{kind}"))

        yield starter


@pytest.mark.parametrize("part", BREAK)
async def test_a_part_that_fails_ends_the_process(start: Start, tmp_path: Path, part: str) -> None:
    kind, change = BREAK[part]
    etcd = EmbeddedEtcd(tmp_path / "data", log_path=tmp_path / "log")
    await etcd.start()
    broken = start(kind, etcd.endpoint, change)
    if kind == "router":
        start("worker", etcd.endpoint)
    code = await asyncio.to_thread(broken.wait, 60.0)
    await etcd.stop()
    assert code == 1, broken.transcript()
    assert any("LookupError: nobody expected it" in line for line in broken.err)


@pytest.mark.parametrize("kind", COMMANDS)
async def test_by_hand_it_waits_for_etcd_and_says_so_once(
    start: Start, tmp_path: Path, kind: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = start(kind, f"127.0.0.1:{port}")

    def said() -> list[str]:
        return [line for line in launched.err if "waiting for etcd at" in line]

    await asyncio.to_thread(launched.wait_until, lambda: bool(said()))
    etcd = EmbeddedEtcd(tmp_path / "data", log_path=tmp_path / "log", client_port=port)
    await etcd.start()
    await asyncio.to_thread(launched.wait_for, r" ready  pid ")
    back = re.compile("etcd answers after")
    await asyncio.to_thread(launched.wait_until, lambda: any(map(back.search, launched.err)))
    assert launched.process.poll() is None
    assert len(said()) == 1, launched.transcript()
    code = await asyncio.to_thread(launched.stop, signal.SIGTERM)
    await etcd.stop()
    assert code == 0, launched.transcript()
