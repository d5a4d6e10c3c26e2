"""What a person reads: lines on stdout, and complaints of one line on stderr."""

from __future__ import annotations

import contextlib
import sys


def say(line: str = "", *, end: str = "\n") -> None:
    """Write to stdout at once; a reader who left (`| head`) is no reason to stop a cluster."""
    with contextlib.suppress(OSError):
        sys.stdout.write(line + end)
        sys.stdout.flush()


def complain(message: str) -> None:
    """Write `dovetail: message` to stderr, always one line."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"dovetail: {' '.join(message.split())}\n")
        sys.stderr.flush()
