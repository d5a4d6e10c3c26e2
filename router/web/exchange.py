"""One request and its answer: ASGI's `receive` and `send` on a connection.

    head -> receive: body parts ... -> send: head, body parts ... -> answered
                 '-> cut off: the body is malformed, late or ended early; an answer may still arrive
    lost, at any time: the client is gone (`receive`, `when_gone`), what is sent goes nowhere

The application gives status, headers and body; how the answer is framed is decided here, so
`content-length`, `transfer-encoding`, `connection` and `date` are not its business.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable
from typing import Protocol

from core.errors import RequestError
from router.web.asgi import WHEN_GONE, AsgiApp, Message, Scope
from router.web.errors import error_body, error_headers, internal_error
from router.web.request_parser import RequestHead

_log = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 64 << 10
"""Of a body, until reading from the client pauses."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_BODILESS = (204, 304)


class Wire(Protocol):
    """What an exchange needs of its connection."""

    @property
    def writable(self) -> asyncio.Future[None] | None:
        """Done when the client took enough of what was sent, or is gone; None while it has."""
        ...

    def write(self, data: bytes) -> None:
        """Send, without waiting."""
        ...

    def wants_more(self) -> None:
        """Read on, if reading had paused."""
        ...

    def answered(self, *, keeps_alive: bool) -> None:
        """The answer is out."""
        ...

    def abort(self) -> None:
        """Drop the connection: the answer cannot be completed."""
        ...

    def date(self) -> bytes:
        """Return the `date` header's value."""
        ...


class Exchange:
    """Fed by the connection, run as a task.

    Attributes:
        scope: ASGI's.
        is_complete: the whole request came.
        is_awaited: the application waits for more of the body.
    """

    __slots__ = (
        "_app",
        "_body",
        "_cut_off_by",
        "_expects_continue",
        "_has_answered",
        "_has_sent_all",
        "_has_sent_head",
        "_head",
        "_is_chunked",
        "_is_head",
        "_is_lost",
        "_is_read",
        "_keeps_alive",
        "_news",
        "_on_gone",
        "_probe",
        "_wire",
        "is_complete",
        "scope",
    )

    def __init__(self, app: AsgiApp, head: RequestHead, scope: Scope, wire: Wire) -> None:
        self._app = app
        self.scope = scope
        self.is_complete = False
        self._wire = wire
        self._keeps_alive = head.keeps_alive
        self._expects_continue = head.expects_continue
        self._body = bytearray()
        self._news: asyncio.Future[None] | None = None
        self._on_gone: Callable[[], None] | None = None
        self._is_read = False  # the application has the whole body
        self._cut_off_by: RequestError | None = None
        self._is_lost = False
        self._head: Message | None = None
        self._has_sent_head = False
        self._has_sent_all = False  # and the client has taken enough of it: `_has_answered`
        self._has_answered = False
        self._is_chunked = False
        self._is_head = head.method == "HEAD"
        self._probe = b""

    # -- the connection's side -------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        return self._news is not None and not self.is_complete

    @property
    def is_full(self) -> bool:
        """Whether enough of the body waits for the application."""
        return len(self._body) > MAX_UNREAD_BYTES

    def feed(self, data: bytes) -> None:
        """Take some of the body."""
        self._body += data
        self._wake()

    def complete(self) -> None:
        """The whole request came."""
        self.is_complete = True
        self._wake()

    def cut_off(self, reason: RequestError) -> None:
        """The rest of the body cannot come; the client may still listen, and is told why."""
        self._cut_off_by = reason
        self._keeps_alive = False
        self._wake()

    def lose(self) -> None:
        """The client is gone."""
        self._is_lost = True
        self._wake()
        if self._on_gone is not None:
            self._on_gone()

    def close_after(self) -> None:
        """No other request follows this one."""
        self._keeps_alive = False

    def probe(self) -> bool:
        """Send something that changes no answer, so that a client who is gone, and has not only
        closed its sending half, replies with a reset. Returns False where there is nothing such."""
        if self._has_sent_head:
            if self._probe:
                self._wire.write(self._framed(self._probe, more=True))
            return True
        if self.scope["http_version"] == "1.0":
            return False
        self._wire.write(CONTINUE)
        return True

    async def run(self) -> None:
        """Have the application answer it."""
        try:
            scope = {**self.scope, WHEN_GONE: self.when_gone}  # in its own it were a cycle
            await self._app(scope, self.receive, self.send)
        except Exception:  # noqa: BLE001 - the border: a 500 for the client, the trace for the log
            _log.exception("the application failed")
            await self._fail()
        finally:
            if not self._has_answered and not self._is_lost:
                self._wire.abort()

    async def _fail(self) -> None:
        if not self._has_sent_head:
            error = internal_error()
            head: Message = {"status": error.status, "headers": error_headers(error)}
            await self.send({"type": "http.response.start", **head})
            await self.send({"type": "http.response.body", "body": error_body(error)})

    # -- the application's side ------------------------------------------------------------------

    def when_gone(self, call: Callable[[], None] | None) -> None:
        """Call this, which must not fail, when the client is found to be gone; None: no longer. Not
        ASGI's way, which takes a task that waits in `receive` beside every request."""
        self._on_gone = call

    async def receive(self) -> Message:
        """Return `http.request` until the body ended, then `http.disconnect` when the client is
        gone or the answer is out; with a `reason`, a RequestError, where the body cannot be
        completed but the client may still listen."""
        while not self._is_lost and not self._has_answered:
            if self._body or (self.is_complete and not self._is_read):
                return self._next_part()
            if self._cut_off_by is not None and not self._is_read:
                return {"type": "http.disconnect", "reason": self._cut_off_by}
            if self._expects_continue and not self._has_sent_head and not self.is_complete:
                self._expects_continue = False
                self._wire.write(CONTINUE)
            self._news = asyncio.get_running_loop().create_future()
            self._wire.wants_more()
            try:
                await self._news
            finally:
                self._news = None
        return {"type": "http.disconnect"}

    def _next_part(self) -> Message:
        part, self._body = bytes(self._body), bytearray()
        self._is_read = self.is_complete
        return {"type": "http.request", "body": part, "more_body": not self.is_complete}

    async def send(self, message: Message) -> None:
        """Send; returns when the client took enough of it that the next may follow.

        `http.response.start` may have `probe`: bytes that may stand between any two body parts.
        """
        if self._is_lost:
            return
        assert not self._has_sent_all, "nothing follows the last part: another answer may be next"
        if message["type"] == "http.response.start":
            self._head = message
            return
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if self._has_sent_head:
            data = self._framed(body, more=more)
        else:
            data = self._first(body, more=more)
        if not more:
            self._has_sent_all = True
            self._probe = b""
        self._wire.write(data)
        while (writable := self._wire.writable) is not None:
            await asyncio.shield(writable)
        if not more and not self._is_lost:
            self._has_answered = True
            self._wake()
            self._wire.answered(keeps_alive=self._keeps_alive)

    def _first(self, body: bytes, *, more: bool) -> bytes:
        """Return the head, and the body's first part with it."""
        assert self._head is not None, "the body comes after http.response.start"
        status: int = self._head["status"]
        lines = [_STATUS_LINE[status]]
        for name, value in self._head["headers"]:
            assert b"\n" not in value, name
            lines.append(name + b": " + value)
        lines.append(b"date: " + self._wire.date())
        is_old = self.scope["http_version"] == "1.0"
        if not more and status not in _BODILESS:
            lines.append(b"content-length: %d" % len(body))
        elif more and not is_old:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked")
        if not self.is_complete or (more and is_old):
            self._keeps_alive = False
        if not self._keeps_alive:
            lines.append(b"connection: close")
        self._has_sent_head = True
        self._probe = self._head.get("probe", b"")
        return b"\r\n".join([*lines, b"", self._framed(body, more=more)])

    def _framed(self, body: bytes, *, more: bool) -> bytes:
        if self._is_head:
            return b""
        if not self._is_chunked:
            return body
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk if more else chunk + b"0\r\n\r\n"

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


_STATUS_LINE = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in http.HTTPStatus
}
