"""How far a download is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol, Self

from tqdm import tqdm

from core.clock import Clock
from deploy.terminal import say

LINE_EVERY_S = 10.0


class Progress(Protocol):
    """Bytes that arrived; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def update(self, num_bytes: int, /) -> object:
        """Count more bytes; fewer where some have to come again."""
        ...


def progress_of(title: str, total_bytes: int, clock: Clock) -> Progress:
    """Return what fits: a bar where stderr is a terminal."""
    if sys.stderr.isatty():
        return tqdm(
            desc=title, total=total_bytes, unit="B", unit_scale=True, file=sys.stderr, leave=False
        )
    return LineProgress(title, total_bytes, clock)


class LineProgress:
    """A line every ten seconds."""

    def __init__(self, title: str, total_bytes: int, clock: Clock) -> None:
        self._title = title
        self._total = total_bytes
        self._clock = clock
        self._done = 0
        self._said_at = clock.now()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def update(self, num_bytes: int) -> None:
        """Count more bytes."""
        self._done += num_bytes
        now = self._clock.now()
        if now - self._said_at >= LINE_EVERY_S:
            self._said_at = now
            say(f"download    {self._title}: {size(self._done)} of {size(self._total)}")


def size(num_bytes: int) -> str:
    """Return a size for people: 98.1 MB."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1000
    return f"{value:.1f} GB"
