"""One child process of the launcher, over all its lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import BinaryIO

from core.back_off import Dice
from core.clock import Clock
from core.environment import child_environment
from core.errors import DovetailError, UsageError
from deploy.launcher.plan import ComponentSpec
from deploy.launcher.restart_delay import RestartDelay
from deploy.readiness import Readiness, StartRefused, describe, parse
from deploy.terminal import complain, say

START_TIMEOUT_S = 300.0
"""Loading a large model takes minutes; without an end a stuck child would look like one."""


class StartFailure(DovetailError):  # noqa: N818 - reads as a state
    """A component ended, or stayed silent, before it was ready."""


class Component:
    """start -> ready -> died -> back-off -> start ...; to end it, cancel `keep_alive`, then `stop`.
    One that ends with exit code 0 has left, and is not started again.

    Args:
        rng: draws the jitter of restarts.
        log_file: where its stdout and stderr go, appended; None: to our stderr.
    """

    def __init__(
        self, spec: ComponentSpec, *, clock: Clock, rng: Dice, log_file: Path | None = None
    ) -> None:
        self.name = spec.name
        self.ready = asyncio.Event()  # set once, by the first life
        self._command = spec.command
        self._clock = clock
        self._rng = rng
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None

    async def keep_alive(self) -> None:
        """Run until cancelled or until it leaves, starting the process again when it dies.

        Raises:
            UsageError: the first life refused to start for a user's slip.
            StartFailure: the first life did not become ready.
        """
        await self._start()
        self.ready.set()
        delay = RestartDelay(self._rng)
        while True:
            started = self._clock.now()
            code = await self._wait()
            if code == 0:  # it was told to: SIGTERM, or `dovetail drain`
                say(f"{self.name:<12} left")
                return
            delay_s = delay.after(self._clock.now() - started)
            say(f"{self.name:<12} died ({describe_exit(code)}), starts again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            # A later life that does not get ready is one more death: others still serve.
            try:
                await self._start()
            except (StartFailure, UsageError) as error:
                complain(str(error))

    async def stop(self, grace_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """End it: a signal, and SIGKILL after `grace_s` seconds. No restart may be under way."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(number)
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            complain(f"{self.name} did not stop within {grace_s:g} s and is killed")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Signal it while it lives. `asyncio`'s own methods would first ask whether it does, which
        takes the exit status of one that has just ended from whoever waits for it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _start(self) -> None:
        reading, writing = os.pipe()
        try:
            await self._spawn(writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        try:
            line = await asyncio.wait_for(_read_line(reading), START_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            msg = f"{self.name} was not ready within {START_TIMEOUT_S:g} s{self._where()}"
            raise StartFailure(msg) from None
        report = parse(line)
        if isinstance(report, Readiness):
            say(describe(report))
            return
        self.kill()  # a child that closed its pipe has nothing more to say
        code = await self._wait()
        if isinstance(report, StartRefused):
            raise UsageError(report.message)
        msg = f"{self.name} ended before it was ready ({describe_exit(code)}){self._where()}"
        raise StartFailure(msg)

    async def _spawn(self, ready_fd: int) -> None:
        with contextlib.ExitStack() as stack:
            log: BinaryIO | int | None = None
            if self._log_file is not None:
                log = stack.enter_context(self._log_file.open("ab"))
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--ready-fd",
                str(ready_fd),
                stdin=subprocess.DEVNULL,
                # stdout carries the launcher's own lines only.
                stdout=log if log is not None else 2,
                stderr=log,
                pass_fds=(ready_fd,),
                env=child_environment(),
                # The terminal's Ctrl-C goes to the launcher alone, which stops them in order.
                start_new_session=True,
            )

    async def _wait(self) -> int:
        if self._process is None:
            msg = f"{self.name} was never started"
            raise RuntimeError(msg)
        return await self._process.wait()

    def _where(self) -> str:
        return f"; see {self._log_file}" if self._log_file is not None else ""


async def _read_line(fd: int) -> bytes:
    """Read to the first newline or the end; closes `fd`."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        return await reader.readline()
    finally:
        transport.close()


def describe_exit(code: int) -> str:
    """Return an exit code of `subprocess` in words: negative ones are signals."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
