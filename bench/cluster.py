"""A cluster of this checkout in processes of its own, on free ports."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

from core.environment import child_environment
from deploy.launcher.welcome import READY

START_S = 60.0
STOP_S = 20.0
_ROOT = Path(__file__).parent.parent


class ClusterFailed(Exception):  # noqa: N818 - says what happened
    """`dovetail up` did not become ready; the message holds what it said."""


@contextlib.contextmanager
def cluster(arguments: Sequence[str]) -> Generator[int]:
    """Run `dovetail up` with these arguments; gives the API's port while it is ready.

    Raises:
        ClusterFailed: it ended, or was not ready within `START_S`.
    """
    port = _free_port()
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-m", "deploy", "up", "--port", str(port), *arguments]
        with subprocess.Popen(  # noqa: S603 - our own command
            command,
            cwd=_ROOT,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process:
            try:
                said = _wait_until_ready(process)
                if not said.ready:
                    errors.seek(0)
                    what = "".join(said.lines) + errors.read().decode(errors="replace")
                    msg = f"{' '.join(command)} did not become ready:\n{what}"
                    raise ClusterFailed(msg)
                yield port
            finally:
                _stop(process)


class _Said:
    """What the launcher printed; read on for as long as it lives, or its pipe would fill."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self.ready = False
        self.decided = threading.Event()
        assert process.stdout is not None
        self._output = process.stdout
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):  # closed under us while stopping
            for line in self._output:
                self.lines.append(line)
                if line.startswith(READY):
                    self.ready = True
                    self.decided.set()
        self.decided.set()


def _wait_until_ready(process: subprocess.Popen[str]) -> _Said:
    said = _Said(process)
    said.decided.wait(START_S)
    return said


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
