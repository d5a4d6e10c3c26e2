"""A router and a worker, each a real process, around an etcd that comes late or keeps them out, and
with a part that fails: they wait and serve, or end loudly for whoever starts them again."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Protocol

import httpx
import pytest

from control_plane.etcd.embedded import EmbeddedEtcd
from tests.etcd_server import Certificates, EtcdServer, reserve_ports
from tests.launched import Launched
from tests.slow_proxy import slow_proxy

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
    def __call__(
        self, kind: str, etcd: str, change: str = "", flags: Sequence[str] = ()
    ) -> Launched: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def starter(kind: str, etcd: str, change: str = "", flags: Sequence[str] = ()) -> Launched:
            program = [sys.executable, "-c", PROGRAM.format(change=change)]
            command = [*program, *COMMANDS[kind], "--etcd", etcd, *flags]
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


USER, PASSWORD = "dovetail", "sesame-47"


async def test_by_hand_they_wait_for_an_etcd_far_away_and_say_so_once(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has certificates and users, is half a second away each way, and is not there yet."""
    monkeypatch.setenv("DOVETAIL_ETCD_PASSWORD", PASSWORD)
    tls = Certificates(tmp_path / "certificates")
    flags = set_flags(tls.ca)
    async with AsyncExitStack() as stack:
        etcd = EtcdServer(tmp_path, flags={"bcrypt-cost": "4"}, tls=tls)
        stack.push(etcd)
        proxy = await stack.enter_async_context(slow_proxy(etcd.endpoint, 0.5))
        (port,) = reserve_ports(1, stack)
        url = f"http://127.0.0.1:{port}"
        of_kind = {"router": ("--port", str(port)), "worker": ()}
        started = {
            kind: start(kind, proxy.endpoint, flags=(*flags, *of_kind[kind])) for kind in COMMANDS
        }
        waits = re.compile(f"waiting for etcd at {proxy.endpoint} over TLS")
        for launched in started.values():
            await seen_in_err(launched, waits)
            assert launched.out == [], "nothing is ready"
        transport = httpx.HTTPTransport(retries=5)  # it may be about to listen
        http = stack.enter_context(httpx.Client(base_url=url, transport=transport, timeout=60))
        assert (await asyncio.to_thread(http.get, "/health/ready")).status_code == 503
        etcd.spawn()
        await asyncio.to_thread(etcd.wait_ready)
        await asyncio.to_thread(etcd.add_users, USER, PASSWORD, "/dovetail/")
        for launched in started.values():
            await asyncio.to_thread(launched.wait_for, r" ready  pid ", 120.0)
            await seen_in_err(launched, re.compile("etcd answers after"))
        status = await asyncio.to_thread(http.get, "/status")
        assert status.status_code == 200
        for kind, launched in started.items():
            assert len([line for line in launched.err if waits.search(line)]) == 1, kind
            code = await asyncio.to_thread(launched.stop, signal.SIGTERM, 60.0)
            assert code == 0, launched.transcript()
            assert PASSWORD not in launched.transcript()
        assert PASSWORD not in status.text


async def seen_in_err(launched: Launched, pattern: re.Pattern[str]) -> None:
    def is_seen() -> bool:
        return any(map(pattern.search, launched.err))

    await asyncio.to_thread(launched.wait_until, is_seen, 120.0)
    assert is_seen(), launched.transcript()
    assert launched.process.poll() is None


async def test_who_is_kept_out_says_why_in_one_line_and_ends(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_ETCD_PASSWORD", "wrong-47")
    tls, strangers = (Certificates(tmp_path / name) for name in ("certificates", "strangers"))
    with EtcdServer(tmp_path, flags={"bcrypt-cost": "4"}, tls=tls) as etcd:
        etcd.add_users(USER, PASSWORD, "/dovetail/")
        expected = {
            "router": (strangers.ca, r"etcd_ca_file = '.*': did not sign the certificate of etcd"),
            "worker": (tls.ca, r"etcd_user = '.*': .* with the password from DOVETAIL_ETCD_PASS"),
        }
        started = {
            kind: start(kind, etcd.endpoint, flags=set_flags(ca))
            for kind, (ca, _) in expected.items()
        }
        for kind, launched in started.items():
            assert await asyncio.to_thread(launched.wait, 120.0) == 2, launched.transcript()
            assert launched.out == []
            (line,) = launched.err
            assert re.search(expected[kind][1], line), line


def set_flags(ca: str) -> list[str]:
    settings = (f"etcd_ca_file={ca}", f"etcd_user={USER}")
    return [word for setting in settings for word in ("--set", f"control_plane.{setting}")]
