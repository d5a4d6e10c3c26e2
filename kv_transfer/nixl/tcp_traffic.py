"""How many bytes this process's TCP sockets carried: what tells UCX's TCP from its CMA."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

import msgspec

_CARRIED = struct.Struct("@QQ")
_CARRIED_OFFSET = 120  # tcpi_bytes_acked, tcpi_bytes_received: linux/tcp.h, since Linux 4.1


class Carried(msgspec.Struct, frozen=True):
    """Bytes that a socket's peer acknowledged, and that came from it."""

    sent: int = 0
    received: int = 0


Traffic = dict[str, Carried]
"""By socket, since it was opened."""


def tcp_traffic() -> Traffic:
    """Return what each open socket carried, those of libraries too.

    Costs some microseconds a file descriptor.
    """
    traffic: Traffic = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            name = os.readlink(entry)
            if name.startswith("socket:"):
                traffic[name] = _carried_by(int(entry.name))
    return traffic


def busiest_since(before: Traffic) -> Carried:
    """Return the most that one socket sent, and that one received, since `tcp_traffic` returned
    `before`. Sockets that were closed meanwhile count for nothing."""
    sent = received = 0
    for name, now in tcp_traffic().items():
        then = before.get(name, Carried())
        sent = max(sent, now.sent - then.sent)
        received = max(received, now.received - then.received)
    return Carried(sent, received)


def _carried_by(descriptor: int) -> Carried:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
            return Carried()
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _CARRIED_OFFSET + _CARRIED.size:
        return Carried()
    sent, received = _CARRIED.unpack_from(info, _CARRIED_OFFSET)
    return Carried(sent, received)
