"""What a person reads: lines on stdout, and complaints of one line on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def say(line: str = "", *, end: str = "\n") -> None:
    """Write to stdout at once; a reader who left (`| head`) is no reason to stop a cluster."""
    _write(sys.stdout, line + end)


def show(text: str) -> None:
    """Write to stdout at once what is worth making only while somebody reads it.

    Raises:
        BrokenPipeError: the reader left.
    """
    try:
        _put(sys.stdout, text)
    except BrokenPipeError:
        raise
    except OSError:  # as for `say`: a full disk, say, ends no conversation
        return


def lead_stdout_nowhere() -> None:
    """Let what stdout still holds vanish: its flush at the end of the process would fail again."""
    with contextlib.suppress(OSError):  # a stdout without a descriptor
        descriptor = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def complain(message: str) -> None:
    """Write `dovetail: message` to stderr, always one line."""
    _write(sys.stderr, f"dovetail: {' '.join(message.split())}\n")


def _write(stream: TextIO | None, text: str) -> None:
    with contextlib.suppress(OSError):
        _put(stream, text)


def _put(stream: TextIO | None, text: str) -> None:
    if stream is None:  # Python's value for a descriptor that was closed from the start
        return
    stream.write(text)
    stream.flush()
