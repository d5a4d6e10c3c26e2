"""What a person reads: lines on stdout, and complaints of one line on stderr."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


def say(line: str = "", *, end: str = "\n") -> None:
    """Write to stdout at once; a reader who left (`| head`) is no reason to stop a cluster."""
    _write(sys.stdout, line + end)


def complain(message: str) -> None:
    """Write `dovetail: message` to stderr, always one line."""
    _write(sys.stderr, f"dovetail: {' '.join(message.split())}\n")


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # Python's value for a descriptor that was closed from the start
        return
    with contextlib.suppress(OSError):
        stream.write(text)
        stream.flush()
