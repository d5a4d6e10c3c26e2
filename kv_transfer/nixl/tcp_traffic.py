"""How many bytes this process's TCP sockets have delivered: what tells UCX's TCP from its CMA."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_BYTES_ACKED = struct.Struct("@Q")
_BYTES_ACKED_OFFSET = 120  # tcpi_bytes_acked of struct tcp_info, linux/tcp.h, since Linux 4.1


def acked_by_socket() -> dict[str, int]:
    """Return the bytes acknowledged by the peer of each open socket, those of libraries too.

    Costs some microseconds a file descriptor.
    """
    acked: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            name = os.readlink(entry)
            if name.startswith("socket:"):
                acked[name] = _acked_on(int(entry.name))
    return acked


def acked_since(before: dict[str, int]) -> int:
    """Return the bytes acknowledged since `acked_by_socket` returned `before`, on the sockets that
    are open now: one that was closed meanwhile must not take its whole past off the sum."""
    return sum(acked - before.get(name, 0) for name, acked in acked_by_socket().items())


def _acked_on(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _BYTES_ACKED_OFFSET + _BYTES_ACKED.size:
        return 0
    return int(_BYTES_ACKED.unpack_from(info, _BYTES_ACKED_OFFSET)[0])
