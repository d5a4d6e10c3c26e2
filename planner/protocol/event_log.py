"""What happened in a run, in order: for people, and as one hash that says whether two runs are the
same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import islice

from core.messages import WorkerLoad

_WIDTH = 240

_Line = tuple[float, str, str, object]
"""(virtual second, who, what, detail)."""


class EventLog:
    """Lines of what happened; written out only when somebody reads them."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._lines: list[_Line] = []
        self.is_closed = False

    def add(self, who: str, what: str, detail: object = "") -> None:
        """Note something. The detail must not change any more, and look the same in every run."""
        if not self.is_closed:
            self._lines.append((self._time(), who, what, detail))

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._lines)

    def tail(self, count: int) -> list[str]:
        """Return the last `count` lines as text, cut to a readable length, without heartbeats."""
        telling = (line for line in reversed(self._lines) if not isinstance(line[3], WorkerLoad))
        return [_text(line)[:_WIDTH] for line in islice(telling, count)][::-1]

    def digest(self) -> str:
        """Return a hash over all lines, 32 hex digits."""
        whole = hashlib.blake2b(digest_size=16)
        for line in self._lines:
            whole.update(_text(line).encode())
            whole.update(b"\n")
        return whole.hexdigest()


def _text(line: _Line) -> str:
    at, who, what, detail = line
    return f"{at:9.4f} {who:>12} {what} {detail}".rstrip()
