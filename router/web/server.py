"""granian inside our own event loop, on a socket that we made.

Making the socket ourselves gives one clear line when the port is taken, a free port for port 0, and
TCP_NODELAY, which accepted sockets inherit on Linux (without it a token's packet waits for the
acknowledgement of the one before, 40 ms).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Protocol

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server

from core.errors import UsageError
from router.web.asgi import Receive, Scope, Send

_log = logging.getLogger(__name__)

_BACKLOG = 1024
_ABORTED_S = 2.0
"""How long aborted answers may take to leave."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        UsageError: the port is in use, or the address is not this machine's.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        msg = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise UsageError(msg) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        msg = f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port"
        raise UsageError(msg) from None
    return sock


class ServedApp(Protocol):
    """An ASGI application that can end what it is doing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        ...

    def abort_all(self) -> None:
        """End all running answers."""
        ...

    def close(self) -> None:
        """Release threads."""
        ...


class _SocketServer(Server):
    """granian's embedded server on a given socket, which it owns from here on."""

    def __init__(self, app: ServedApp, sock: socket.socket) -> None:
        super().__init__(
            app,
            interface=Interfaces.ASGINL,
            http=HTTPModes.auto,
            log_enabled=False,
            backlog=_BACKLOG,
            backpressure=1 << 16,  # the dispatcher refuses, not a silent accept queue
        )
        self._given = sock

    def _init_shared_socket(self) -> None:
        # granian's stub leaves the constructor out; its own process server calls it like this.
        self._shd = SocketHolder(self._given.detach(), False, _BACKLOG)  # pyright: ignore[reportCallIssue]


class ApiServer:
    """Serves the application.

    start() -> port ... stop(drain_s): no new connections, running answers may end for `drain_s`,
    then they end with an error.
    """

    def __init__(self, app: ServedApp, host: str, port: int) -> None:
        """Raises: UsageError: the port cannot be had; one line."""
        self._app = app
        sock = listen(host, port)
        self.port: int = sock.getsockname()[1]
        self._server = _SocketServer(app, sock)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Accept from now on; call inside the event loop that is to run the handlers."""
        self._serving = asyncio.create_task(self._server.serve(), name="http server")

    async def wait(self) -> None:
        """Return when the server ended; raises what it ended with."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def stop(self, drain_s: float) -> None:
        """Stop; returns when the last answer has left."""
        if self._serving is None:
            return
        self._server.stop()
        _, pending = await asyncio.wait({self._serving}, timeout=drain_s)
        if pending:
            _log.warning("answers were still running after %.1f s and are ended", drain_s)
            self._app.abort_all()
            await asyncio.wait(pending, timeout=_ABORTED_S)
        self._app.close()


async def serve(
    app: ServedApp, host: str, port: int, *, stop: asyncio.Event, drain_s: float
) -> None:
    """Serve until `stop` is set, then drain.

    Raises:
        UsageError: the port cannot be had; one line.
    """
    server = ApiServer(app, host, port)
    server.start()
    _log.info("the API listens on http://%s:%d", host, server.port)
    await stop.wait()
    await server.stop(drain_s)
