"""One client's connection: requests in, answers out, each in its turn.

    bytes -> parser -> exchanges in order -> answers -> bytes

- Back-pressure both ways: an answer waits while the client does not read (`writable`), and reading
  pauses while the application, or a queue of pipelined requests, is behind.
- A client that closes its sending half still gets its answers. One that is gone looks the same, or
  hides behind requests that are not read yet. So both are probed: what is sent to who is gone comes
  back as a reset, which the socket's state shows.
- Nothing waits without end: the server calls `check` a few times a second.
- What cannot be parsed is answered in its turn: the application finds in `scope["refusal"]` the
  RequestError to answer with. Then the connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol, cast

from core.config import HttpConfig
from core.errors import RequestError
from router.web.asgi import AsgiApp, Scope
from router.web.exchange import Exchange
from router.web.request_parser import RequestHead, RequestParser

_log = logging.getLogger(__name__)

_WRITE_BUFFER_BYTES = 64 << 10
"""What a client has not taken of its answers, until they wait."""

_MAX_PIPELINED = 16
"""Requests that wait for the answers before theirs, until reading pauses."""

_FEED_BYTES = 16 << 10
"""Parsed at a time: it may hold hundreds of pipelined requests."""

_LINGER_S = 5.0
"""What a client still sends after the last answer is dropped for so long; closing at once would
reset the connection, and the client might lose the answer."""

_FIRST_LOOK_S, _MAX_LOOK_S = 0.05, 1.0
"""From a client's end of sending until it is probed, and between probes at most."""

_TCP_CLOSE = 7
"""linux/tcp_states.h: a connection that was reset."""


class ConnectionOwner(Protocol):
    """What the server does for its connections."""

    http: HttpConfig

    def now(self) -> float:
        """Return monotonic seconds."""
        ...

    def date(self) -> bytes:
        """Return the `date` header's value."""
        ...

    def opened(self, connection: HttpConnection) -> None:
        """Check this connection from now on."""
        ...

    def lingers(self, connection: HttpConnection) -> None:
        """All its answers are out."""
        ...

    def closed(self, connection: HttpConnection) -> None:
        """It is gone."""
        ...

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task and keep it."""
        ...


class HttpConnection(asyncio.Protocol):
    """Implements `RequestSink` for its parser and `Wire` for its exchanges."""

    __slots__ = (
        "_app",
        "_current",
        "_has_eof",
        "_head_since",
        "_is_dropping",
        "_is_last",
        "_is_paused",
        "_lingers_until",
        "_owner",
        "_parser",
        "_receiving",
        "_since",
        "_socket",
        "_taken",
        "_transport",
        "_unparsed",
        "_waiting",
        "_written",
        "writable",
    )

    def __init__(self, app: AsgiApp, owner: ConnectionOwner) -> None:
        self._app = app
        self._owner = owner
        self._transport: asyncio.Transport
        self._parser = RequestParser(self)
        self._current: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._receiving: Exchange | None = None
        self._unparsed = b""
        self._is_paused = False
        self._has_eof = False
        self._is_last = False  # no request is taken after those that are here
        self._is_dropping = False  # what still comes is of no use
        self._lingers_until: float | None = None
        self._since = owner.now()  # the last byte, or the last answer
        self._head_since: float | None = None  # an unfinished head was there at this check
        self._written = 0  # bytes, in all
        self._taken = (0, self._since)  # of those the client took, and when it was seen to
        self.writable: asyncio.Future[None] | None = None

    # -- asyncio's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._socket: int = transport.get_extra_info("socket").fileno()
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._owner.closed(self)
        self._unparsed = b""
        self._is_last = True
        for exchange in (self._current, *self._waiting):
            if exchange is not None:
                exchange.lose()
        self._waiting.clear()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._since = self._owner.now()
        if self._unparsed or len(data) > _FEED_BYTES:
            self._unparsed += data
            self._parse_unparsed()
        else:
            self._parse(data)
            self._pace()

    def eof_received(self) -> bool:
        self._has_eof = True
        if self._lingers_until is not None:
            return False
        if self._parser.has_begun and not self._is_dropping:
            msg = "the request ended before it was complete: it is shorter than announced"
            self._refuse(RequestError(msg, code="incomplete_request"))
        self.close_when_answered()
        if self._current is None:
            return False
        self._look_later(_FIRST_LOOK_S)
        return True

    def pause_writing(self) -> None:
        self.writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self.writable = self.writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # -- the parser's side -----------------------------------------------------------------------

    def head(self, head: RequestHead) -> None:
        if self._is_last:
            return
        self._is_last = not head.keeps_alive
        self._receiving = self._enqueue(head, {})

    def body(self, data: bytes) -> None:
        if self._receiving is not None:
            self._receiving.feed(data)

    def end(self) -> None:
        if self._receiving is not None:
            self._receiving.complete()
            self._receiving = None

    # -- an exchange's side ----------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if data and self._lingers_until is None and not self._transport.is_closing():
            self._written += len(data)
            num_sent = self._send_now(data)
            if num_sent < len(data):
                self._transport.write(data[num_sent:])

    def _send_now(self, data: bytes) -> int:
        """Send what the socket takes at once, if nothing waits before it; return how much.

        uvloop sends at the end of the loop's turn. A worker's step brings every stream its token in
        one turn, and each chunk would leave only when all the others are made.
        """
        if self._transport.get_write_buffer_size():
            return 0
        try:
            return os.write(self._socket, data)
        except OSError:  # full, or reset: the transport finds out which
            return 0

    def wants_more(self) -> None:
        self._parse_unparsed()

    def answered(self, *, keeps_alive: bool) -> None:
        self._since = self._owner.now()
        self._current = None
        if self._waiting and keeps_alive:
            self._start(self._waiting.popleft())
        elif self._is_last or not keeps_alive:
            self._close()
        self._parse_unparsed()

    def abort(self) -> None:
        self._transport.abort()

    def date(self) -> bytes:
        return self._owner.date()

    # -- the server's side -----------------------------------------------------------------------

    def close_when_answered(self) -> None:
        """Take no more requests; close as soon as those that are here are answered."""
        self._is_last = True
        last = self._waiting[-1] if self._waiting else self._current
        if last is not None:
            last.close_after()
        else:
            self._close()

    def check(self, now: float) -> None:
        """End what waits for too long; see `HttpConfig` for how long that is."""
        if self._is_stuck(now):
            _log.info("a client took nothing for %g s: closed", self._owner.http.send_timeout_s)
            self._transport.abort()
        elif self._lingers_until is not None:
            if now >= self._lingers_until:
                self._transport.abort()
        elif self._current is None:
            self._check_idle(now)
        elif self._is_paused and self._waiting and not self._is_there():
            self._transport.abort()
        elif self._current.is_awaited and now - self._since > self._owner.http.body_timeout_s:
            self._refuse(_too_late("body", self._owner.http.body_timeout_s))

    def _check_idle(self, now: float) -> None:
        http = self._owner.http
        if not self._parser.in_head:
            self._head_since = None
            if now - self._since > http.keepalive_timeout_s:
                self._transport.close()
        elif self._head_since is None:
            self._head_since = now
        elif now - self._head_since > http.header_timeout_s:
            self._refuse(_too_late("head", http.header_timeout_s))

    def _is_stuck(self, now: float) -> bool:
        unsent = self._transport.get_write_buffer_size()
        taken = self._written - unsent
        if not unsent or taken > self._taken[0]:
            self._taken = (taken, now)
        return now - self._taken[1] > self._owner.http.send_timeout_s

    # -- inside ----------------------------------------------------------------------------------

    def _parse_unparsed(self) -> None:
        while self._unparsed and not self._is_behind():
            part, self._unparsed = self._unparsed[:_FEED_BYTES], self._unparsed[_FEED_BYTES:]
            self._parse(part)
        self._pace()

    def _parse(self, data: bytes) -> None:
        if self._is_dropping:
            return
        try:
            self._parser.feed(data)
        except RequestError as error:
            self._refuse(error)

    def _is_behind(self) -> bool:
        return len(self._waiting) >= _MAX_PIPELINED or (
            self._receiving is not None and self._receiving.is_full
        )

    def _pace(self) -> None:
        """Read no more than what can be taken."""
        pauses = bool(self._unparsed) or self._is_behind()
        if pauses == self._is_paused or self._transport.is_closing():
            return
        self._is_paused = pauses
        if pauses:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _enqueue(self, head: RequestHead, more: Scope) -> Exchange:
        exchange = Exchange(self._app, head, {**self._scope(head), **more}, self)
        if self._current is None:
            self._start(exchange)
        else:
            self._waiting.append(exchange)
        return exchange

    def _start(self, exchange: Exchange) -> None:
        self._current = exchange
        self._owner.run(exchange.run())

    def _refuse(self, error: RequestError) -> None:
        """Tell the client, in its turn; what it sends from here on is dropped."""
        self._is_last = self._is_dropping = True
        self._unparsed = b""
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.cut_off(error)
            return
        head = RequestHead(
            "GET", "", b"", b"", [], "1.1", keeps_alive=False, expects_continue=False
        )
        self._enqueue(head, {"refusal": error})

    def _look_later(self, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._look, delay_s)

    def _look(self, waited_s: float) -> None:
        if self._current is None or self._transport.is_closing():
            return
        if self._is_there():
            self._look_later(min(2 * waited_s, _MAX_LOOK_S))
        else:
            self._transport.abort()

    def _is_there(self) -> bool:
        """Return False when the client of an answer in progress is known to be gone; ask it, for
        the next time."""
        state = self._transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, 1
        )[0]
        if state == _TCP_CLOSE or self._current is None:
            return False
        has_asked = self._transport.get_write_buffer_size() > 0
        return has_asked or self._current.probe()

    def _close(self) -> None:
        """Every answer is out, though it may not have arrived."""
        if self._transport.is_closing() or self._lingers_until is not None:
            return
        is_done = not (self._parser.has_begun or self._is_dropping or self._unparsed)
        self._is_last = self._is_dropping = True
        self._unparsed = b""
        self._receiving = None
        if is_done or self._has_eof:
            self._transport.close()
        else:
            self._lingers_until = self._owner.now() + _LINGER_S
            self._transport.write_eof()
            self._owner.lingers(self)

    def _scope(self, head: RequestHead) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "method": head.method,
            "scheme": "http",
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "root_path": "",
            "headers": head.headers,
            "client": self._transport.get_extra_info("peername"),
            "server": self._transport.get_extra_info("sockname"),
        }


def _too_late(part: str, timeout_s: float) -> RequestError:
    msg = f"the request's {part} did not come within {timeout_s:g} s"
    return RequestError(msg, status=408, code="request_timeout")
