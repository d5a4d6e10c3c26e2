"""Reading host:port, and who can reach a host."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from core.addresses import is_loopback
from core.config import Config
from core.errors import UsageError


def parse_listen(text: str) -> tuple[str, int]:
    """Read `HOST:PORT`, `HOST` or `:PORT`; a missing port is 0 (any free one), a missing host
    127.0.0.1. IPv6 hosts stand in brackets.

    Raises:
        UsageError: the port is no number from 0 to 65535.
    """
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text, "0"
    if not port.isdecimal() or int(port) > 65535:
        msg = f"--listen {text!r}: must be HOST:PORT with a port from 0 (any free one) to 65535"
        raise UsageError(msg)
    return host.strip("[]") or "127.0.0.1", int(port)


def is_wildcard(host: str) -> bool:
    """Whether `host` means every interface, and so is no address to tell others."""
    return host in ("", "*", "0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


def reachable_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a server that binds to `host`."""
    name = "127.0.0.1" if is_wildcard(host) else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def exposure_warning(config: Config) -> str | None:
    """Return a warning when others than this machine reach the API without a key."""
    if is_loopback(config.http.host) or config.api.keys:
        return None
    return (
        f"warning: the API binds to {config.http.host} without authentication; set keys in [api] "
        "of the config file, or bind to 127.0.0.1"
    )


def fabric_warning(config: Config) -> str | None:
    """Return a warning when others than this machine reach the workers' KV memory."""
    if is_loopback(config.kv_transfer.listen):
        return None
    return (
        f"warning: the fabric binds to {config.kv_transfer.listen} (kv_transfer.listen); whoever "
        "reaches it can read and write KV memory, keep it on a private network"
    )


@contextmanager
def claim_ports(host: str, port: int, count: int) -> Generator[list[int]]:
    """Hold a run of ports, one a router; see `claim_port`.

    Yields:
        `port` and those after it; for 0 free ones.

    Raises:
        UsageError: one of them cannot be had, or would be beyond 65535.
    """
    ports = range(port, port + count) if port else [0] * count
    if port and ports[-1] > 65535:
        msg = f"--routers {count}: --port must be at most {65536 - count}, not {port}"
        raise UsageError(msg)
    with ExitStack() as stack:
        yield [stack.enter_context(claim_port(host, each)) for each in ports]


@contextmanager
def claim_port(host: str, port: int) -> Generator[int]:
    """Hold a port for the router, so that one in use is said before anything starts.

    It is bound without listening: Linux gives it to no connection and to no other claim of any free
    port, but lets a server with SO_REUSEADDR, as the router's is, listen there, also after a
    restart.

    Yields:
        The port; for 0 a free one.

    Raises:
        UsageError: in use, not allowed, or no address of this machine.
    """
    with _bound(host, port) as claim:
        yield int(claim.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as stack:
            claim = stack.enter_context(socket.socket(family, kind))
            # As servers do: a port whose last connections are in TIME_WAIT is free.
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            claim.bind(address)
            stack.pop_all()
            return claim
    except OSError as error:
        msg = f"cannot bind to {host}:{port}: {error.strerror or error}"
        if port:
            msg += "; choose another with --port (make: PORT=), or 0 for any free one"
        raise UsageError(msg) from None
