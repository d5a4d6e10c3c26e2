"""The one directory that a launcher writes to, gone when it ends.

A launcher that was killed cannot remove its own, so the next one does: whoever lives holds a lock
on a file in its directory, and a directory whose lock is free belongs to nobody.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

_PREFIX = "dovetail-"
_LOCK = "lock"


class RunDirectory:
    """A context manager; `path` exists, private to this user, from enter to exit."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._lock_fd = -1
        self.path = base

    def __enter__(self) -> Self:
        """Remove what killed launchers left, then make and lock a fresh directory."""
        remove_abandoned(self._base)
        # Under another prefix until it is locked, so that no other launcher takes it for abandoned.
        fresh = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=self._base))
        self._lock_fd = os.open(fresh / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        self.path = fresh.rename(self._base / fresh.name.removeprefix("."))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the directory with all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def remove_abandoned(base: Path) -> None:
    """Remove this user's run directories whose launcher lives no more."""
    for directory in base.glob(f"{_PREFIX}*"):
        try:
            if directory.stat().st_uid != os.getuid():
                continue
            lock_fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # no run directory of ours, or removed by its launcher meanwhile
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock_fd)
