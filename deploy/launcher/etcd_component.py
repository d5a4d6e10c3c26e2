"""The embedded etcd over all its lives: same data, same port, so that clients find it again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from control_plane.etcd.embedded import EmbeddedEtcd
from core.back_off import Dice
from core.clock import Clock
from core.errors import ControlPlaneError
from deploy.launcher.component import describe_exit
from deploy.launcher.restart_delay import RestartDelay
from deploy.readiness import Readiness, describe
from deploy.terminal import complain, say

NAME = "etcd"


class EtcdComponent:
    """start -> died -> back-off -> start ...; to end it, cancel `keep_alive`, then `stop`.

    Args:
        data_directory: outlives a life, not the launcher.
        log_path: etcd's own log, appended.
        rng: draws the jitter of restarts.
    """

    def __init__(self, data_directory: Path, *, log_path: Path, clock: Clock, rng: Dice) -> None:
        self._data_directory = data_directory
        self._log_path = log_path
        self._clock = clock
        self._rng = rng
        self._server = EmbeddedEtcd(data_directory, log_path=log_path)

    @property
    def endpoint(self) -> str:
        """host:port for clients, the same in every life."""
        return self._server.endpoint

    async def start(self) -> None:
        """Return once the first life answers.

        Raises:
            UsageError: the wheel is missing.
            ControlPlaneError: it does not come up; with its last words, since its log may lie in a
                directory that is about to be removed.
        """
        try:
            await self._server.start()
        except ControlPlaneError as error:
            msg = f"{error}; it said last: {_last_line(self._log_path)}"
            raise ControlPlaneError(msg) from None
        self._say_ready()

    async def keep_alive(self) -> None:
        """Start it again when it dies, until cancelled; serving goes on meanwhile."""
        delay = RestartDelay(self._rng)
        port = int(self.endpoint.rpartition(":")[2])
        while True:
            started = self._clock.now()
            code = await self._server.wait()
            delay_s = delay.after(self._clock.now() - started)
            say(f"{NAME:<12} died ({describe_exit(code)}), starts again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            self._server = EmbeddedEtcd(
                self._data_directory, log_path=self._log_path, client_port=port
            )
            try:
                await self._server.start()
            except ControlPlaneError as error:
                complain(str(error))
            else:
                self._say_ready()

    async def stop(self) -> None:
        """End it, at the latest after 5 s."""
        await self._server.stop()

    def kill(self) -> None:
        """End it at once."""
        pid = self._server.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _say_ready(self) -> None:
        say(describe(Readiness(NAME, self._server.pid or 0, self.endpoint)))


def _last_line(file: Path) -> str:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "nothing"
    return lines[-1] if lines else "nothing"
