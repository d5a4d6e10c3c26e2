"""Real etcd servers for tests, plain child processes: they outlive an event loop, so that one
serves a whole module, and take the flags that `control_plane.etcd.embedded` has no use for."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import trustme

from control_plane.etcd.embedded import server_binary
from core.environment import child_environment

READY_S = 60.0


def reserve_ports(count: int, stack: ExitStack | AsyncExitStack) -> list[int]:
    """Return free ports that nobody else takes while `stack` is open: bound here, and as both sides
    set SO_REUSEADDR, to be listened at by those who are told."""
    probes = [stack.enter_context(socket.socket()) for _ in range(count)]
    for probe in probes:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
    return [probe.getsockname()[1] for probe in probes]


class Certificates:
    """A CA, a certificate for 127.0.0.1, and one for clients, as files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA(key_type=trustme.KeyType.RSA)
        self.ca = str(directory / "ca.pem")
        authority.cert_pem.write_to_path(self.ca)
        for name in ("127.0.0.1", "client@example.org"):
            issued = authority.issue_cert(name, key_type=trustme.KeyType.RSA)
            issued.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
            issued.private_key_pem.write_to_path(directory / f"{name}.key")
        self.client = str(directory / "client@example.org.pem")
        self.client_key = str(directory / "client@example.org.key")
        self._server = str(directory / "127.0.0.1.pem")
        self.server_key = str(directory / "127.0.0.1.key")

    @property
    def server_flags(self) -> dict[str, str]:
        return {"cert-file": self._server, "key-file": self.server_key}

    @property
    def mutual_flags(self) -> dict[str, str]:
        """In addition, where clients need certificates."""
        return {"client-cert-auth": "true", "trusted-ca-file": self.ca}

    @property
    def ctl_flags(self) -> tuple[str, ...]:
        return (f"--cacert={self.ca}", f"--cert={self.client}", f"--key={self.client_key}")


class EtcdServer:
    """One member at fixed ports, which it keeps for all its lives. Use it as a context.

    Args:
        flags: beside or in place of those that `_command` has.
        tls: what it speaks TLS with.
    """

    def __init__(
        self,
        directory: Path,
        *,
        flags: Mapping[str, str] | None = None,
        tls: Certificates | None = None,
        name: str = "default",
    ) -> None:
        self._directory = directory / name
        self._directory.mkdir(parents=True, exist_ok=True)
        self._flags = {**(tls.server_flags if tls else {}), **(flags or {})}
        self._ctl_flags = tls.ctl_flags if tls else ()
        self._scheme = "https" if tls else "http"
        self._name = name
        self._stack = ExitStack()
        client_port, peer_port = reserve_ports(2, self._stack)
        self.endpoint = f"127.0.0.1:{client_port}"
        self.peer = f"{name}=http://127.0.0.1:{peer_port}"
        self.members: Sequence[str] = (self.peer,)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EtcdServer:
        self.spawn()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._stack.close()

    @property
    def url(self) -> str:
        """The endpoint as a user writes it."""
        return f"{self._scheme}://{self.endpoint}"

    def spawn(self) -> None:
        """Start it; see `wait_ready`."""
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"dovetail-test-{os.urandom(8).hex()}"
        self._notified.bind(f"\0{name}")
        self._notified.settimeout(READY_S)
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(server_binary()), *[f"--{k}={v}" for k, v in self._command().items()]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment({"NOTIFY_SOCKET": f"@{name}"}),
            )

    def wait_ready(self) -> None:
        """Return once it serves; of several members, once most do."""
        with self._notified:
            try:
                assert b"READY=1" in self._notified.recv(4096)
            except TimeoutError:
                raise AssertionError((self._directory / "log").read_text()) from None

    def kill(self) -> None:
        """End it at once, frozen or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, *, empty: bool = False) -> None:
        """End it, and start it again."""
        self.kill()
        if empty:
            shutil.rmtree(self._directory / "data")
        self.spawn()
        self.wait_ready()

    def revive(self) -> None:
        """Undo what a test did to it, and may have failed in the midst of."""
        if self._process is None:
            self.restart()
        else:
            self.thaw()

    def freeze(self) -> None:
        """Stop it, and return once each of its threads has: a signal takes its time."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        while not all(_is_stopped(task) for task in tasks.iterdir()):
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def ctl(self, *arguments: str) -> str:
        """Run etcdctl, as its administrator would, and return what it says."""
        done = self._ctl(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                str(server_binary().with_name("etcdctl")),
                *(f"--endpoints={self.url}", "--command-timeout=30s", *self._ctl_flags),
                *arguments,
            ],
            capture_output=True,
            text=True,
            env=child_environment({"ETCDCTL_API": "3"}),
            check=False,
        )

    def fill(self) -> None:
        """Write until its quota is used up."""
        for number in itertools.count():
            done = self._ctl("put", f"/fill/{number}", "x" * 100_000)
            if done.returncode:
                assert "database space exceeded" in done.stderr, done.stderr
                return

    def make_space(self) -> None:
        """Undo `fill`, as etcd's manual wants it."""
        self.ctl("del", "--prefix", "/fill/")
        status = json.loads(self.ctl("endpoint", "status", "--write-out=json"))
        revision = status[0]["Status"]["header"]["revision"]
        for command in (("compaction", str(revision)), ("defrag",), ("alarm", "disarm")):
            self.ctl(*command)

    def add_users(self, user: str, password: str, prefix: str) -> None:
        """Switch users on: root, and one that may read and write below a prefix."""
        for arguments in (
            ("user", "add", "root:root"),
            ("role", "add", "root"),
            ("user", "grant-role", "root", "root"),
            ("user", "add", f"{user}:{password}"),
            ("role", "add", "some"),
            ("role", "grant-permission", "some", "readwrite", prefix, "--prefix"),
            ("user", "grant-role", user, "some"),
            ("auth", "enable"),
        ):
            self.ctl(*arguments)
        self._ctl_flags = (*self._ctl_flags, "--user=root:root")

    def _command(self) -> dict[str, str]:
        peer_url = self.peer.partition("=")[2]
        return {
            "name": self._name,
            "data-dir": str(self._directory / "data"),
            # Under another address, too, that its certificate does not have
            "listen-client-urls": f"{self.url},{self.url.replace('127.0.0.1', '127.0.0.2')}",
            "advertise-client-urls": self.url,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": ",".join(self.members),
            "log-level": "warn",
            # A tenth of the defaults: leases of one second, and elections within it.
            "heartbeat-interval": "10",
            "election-timeout": "100",
            **self._flags,
        }


def _is_stopped(task: Path) -> bool:
    try:
        stat = (task / "stat").read_text()
    except FileNotFoundError:
        return True  # the thread has just ended
    return stat.rpartition(") ")[2][0] in "TZ"
