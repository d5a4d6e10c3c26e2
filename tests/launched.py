"""A launcher started as a user starts it, with what a test asks of it."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from core.environment import child_environment


class Launched:
    """A process, its lines as they come, and every process and file that it leaves.

    All its files go into a TMPDIR of their own, which also marks its descendants, whoever their
    parent is by then.
    """

    def __init__(self, command: Sequence[str], temporary: Path) -> None:
        temporary.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary
        self._arrived = threading.Condition()
        self._open_pipes = 2
        self.out: list[str] = []
        self.err: list[str] = []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment({"TMPDIR": str(temporary)}),
            start_new_session=True,
        )
        pipes = ((self.process.stdout, self.out), (self.process.stderr, self.err))
        self._readers = [threading.Thread(target=self._read, args=pair) for pair in pipes]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End whatever a failed test left, so that it does not disturb the next one."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for left in self.descendants():
            left.kill()
        for reader in self._readers:
            reader.join()

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> re.Match[str]:
        """Return the first stdout line that `pattern` matches, read or still to come."""
        found: list[re.Match[str]] = []

        def seen() -> bool:
            found.extend(m for m in (re.search(pattern, line) for line in self.out) if m)
            return bool(found)

        self.wait_until(seen, timeout_s)
        assert found, f"no line like {pattern!r}\n{self.transcript()}"
        return found[0]

    def wait_until(self, seen: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Return once `seen`, which looks at the lines, is true, no line can come any more, or the
        time is over."""
        with self._arrived:
            self._arrived.wait_for(lambda: seen() or self._open_pipes == 0, timeout_s)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Return the exit code, with all lines read."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        return code

    def descendants(self) -> list[psutil.Process]:
        """Return the living processes that carry this launch's mark, but for the launcher."""
        marked: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == str(self._temporary):
                    marked.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return [process for process in marked if process.pid != self.process.pid]

    def assert_nothing_left(self) -> None:
        """Assert that it ended, and left no process and no temporary file."""
        assert self.process.poll() is not None, "still running"
        assert self.descendants() == []
        assert list(self._temporary.iterdir()) == []

    def transcript(self) -> str:
        """Return all that it wrote so far."""
        return "\n".join(["--- stdout", *self.out, "--- stderr", *self.err])

    def _read(self, pipe: IO[str], lines: list[str]) -> None:
        with pipe:
            for line in pipe:
                with self._arrived:
                    lines.append(line.rstrip("\n"))
                    self._arrived.notify_all()
        with self._arrived:
            self._open_pipes -= 1
            self._arrived.notify_all()
