"""HTTP/1.1 on our own event loop and our own socket.

Making the socket ourselves gives one clear line when the port is taken, a free port for port 0, and
options that accepted sockets inherit on Linux: TCP_NODELAY (without it a token's packet waits for
the acknowledgement of the one before, 40 ms), and a bound on what the kernel holds for a client
that does not read.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Awaitable, Coroutine
from email.utils import formatdate
from typing import Any, Protocol

from core.clock import Clock
from core.config import HttpConfig
from core.errors import UsageError
from router.web.asgi import Receive, Scope, Send
from router.web.connection import HttpConnection

_log = logging.getLogger(__name__)

_BACKLOG = 1024
_ABORTED_S = 2.0
"""How long aborted answers may take to leave."""

_CHECK_S = 0.5
"""Between looks at every connection while there are answers; a client that is gone is seen within
two of them."""

_REST_SHARE = 0.25
"""Of the time that an idle connection has at least: between looks while nobody waits for one."""

_UNSENT_BYTES = 64 << 10
"""Of one client's answers in the kernel, without what is under way."""


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
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
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

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request."""
        ...

    def abort_all(self) -> None:
        """End all running answers."""
        ...

    def close(self) -> None:
        """Release threads."""
        ...


class ApiServer:
    """Serves the application; owns its connections (`router.web.connection.ConnectionOwner`).

    start() -> port ... stop(drain_s): no new connections, running answers may end for `drain_s`,
    then they end with an error.
    """

    def __init__(self, app: ServedApp, host: str, port: int, *, http: HttpConfig, clock: Clock):
        """Raises: UsageError: the port cannot be had; one line."""
        self._app = app
        self._socket = listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.http = http
        self._clock = clock
        self._date = (-1, b"")  # a second, and how it is written
        self._connections: set[HttpConnection] = set()
        self._lingering: set[HttpConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stops = asyncio.Event()
        self._no_connections = asyncio.Event()
        self._checking: asyncio.TimerHandle | None = None
        self._rests = False
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Accept from now on; call inside the event loop that is to run the handlers."""
        self._serving = asyncio.create_task(self._serve(), name="http server")

    async def wait(self) -> None:
        """Return when the server ended; raises what it ended with."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def stop(self, drain_s: float) -> None:
        """Stop; returns when the last answer has left."""
        if self._serving is None:
            return
        self._stops.set()
        await asyncio.wait({self._serving})
        if not await self._drained(drain_s):
            _log.warning("answers were still running after %.1f s and are ended", drain_s)
            self._app.abort_all()
            await self._drained(_ABORTED_S)
        for connection in (*self._connections, *self._lingering):
            connection.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_ABORTED_S)
        self._app.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: HttpConnection(self._app, self), sock=self._socket, backlog=_BACKLOG
        )
        await self._stops.wait()
        listener.close()

    async def _drained(self, timeout_s: float) -> bool:
        for connection in tuple(self._connections):
            connection.close_when_answered()
        if not self._connections:
            return True
        self._no_connections.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._no_connections.wait()
        except TimeoutError:
            return False
        return True

    # -- for the connections ---------------------------------------------------------------------

    def now(self) -> float:
        """Return monotonic seconds."""
        return self._clock.now()

    def date(self) -> bytes:
        """Return the `date` header's value, made once a second."""
        second = int(self._clock.wall())
        if second != self._date[0]:
            self._date = (second, formatdate(second, usegmt=True).encode())
        return self._date[1]

    def opened(self, connection: HttpConnection) -> None:
        """Check this connection from now on."""
        if self._stops.is_set():
            connection.abort()  # it was on its way when the listener closed
            return
        self._connections.add(connection)
        if self._checking is None:
            self._check_later()

    def lingers(self, connection: HttpConnection) -> None:
        """All its answers are out: a stop does not wait for it."""
        self._connections.discard(connection)
        self._lingering.add(connection)
        self._count()
        if self._rests:
            self._check_later()

    def closed(self, connection: HttpConnection) -> None:
        """It is gone."""
        self._connections.discard(connection)
        self._lingering.discard(connection)
        self._count()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task and keep it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._rests:
            self._check_later()

    def _count(self) -> None:
        if not self._connections:
            self._no_connections.set()

    def _check(self) -> None:
        """Look at all connections (10,000 take 5 ms); never while there are none."""
        self._checking = None
        now = self._clock.now()
        for connection in (*self._connections, *self._lingering):
            connection.check(now)
        if self._connections or self._lingering:
            self._check_later()

    def _check_later(self) -> None:
        """A few times a second while there are answers, else as idle connections' limits need."""
        if self._checking is not None:
            self._checking.cancel()
        self._rests = not self._tasks and not self._lingering
        limit_s = min(self.http.header_timeout_s, self.http.keepalive_timeout_s)
        wait_s = max(_CHECK_S, _REST_SHARE * limit_s) if self._rests else _CHECK_S
        self._checking = asyncio.get_running_loop().call_later(wait_s, self._check)


def raise_open_file_limit() -> None:
    """Let this process hold as many connections as the system grants; the usual soft limit of 1,024
    is one for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
