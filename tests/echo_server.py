"""The HTTP server alone, with a small application that says what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec

from core.clock import SystemClock
from core.config import HttpConfig
from core.errors import RequestError
from router.web.asgi import (
    Receive,
    Scope,
    Send,
    read_body,
    refuse_what_is_no_request,
    send_bytes,
)
from router.web.errors import error_body, error_headers
from router.web.server import ApiServer
from tests.raw_http import RawClient


class Echo:
    """Answers with what it was asked; some paths do more.

    Attributes:
        gate: /wait and /stream go on when it is set.
        waiting: requests that wait for it.
        left: paths whose client was seen to leave.
        num_sent: parts of /flood, 64 KiB each.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = 0
        self.left: list[str] = []
        self.num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path: str = scope["path"]
        if path == "/unread":
            await send_bytes(send, 200, b"unread")
            return
        if path == "/broken":
            msg = "secret"
            raise ValueError(msg)
        if path == "/silent":
            return
        try:
            refuse_what_is_no_request(scope)
            await read_body(scope, receive, 1 << 30)
        except RequestError as error:
            await send_bytes(send, error.status, error_body(error), error_headers(error))
            return
        if path == "/flood":
            await self._flood(send)
        elif path in ("/wait", "/stream"):
            await self._wait(path, receive, send)
        else:
            await self._echo(scope, send)

    async def _echo(self, scope: Scope, send: Send) -> None:
        seen = f"{scope['method']} {scope['path']}?{scope['query_string'].decode()}"
        await send_bytes(send, 200, seen.encode(), [(b"content-type", b"text/plain")])

    async def _flood(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.gate.is_set():
            self.num_sent += 1
            part = {"body": bytes(1 << 16), "more_body": True}
            await send({"type": "http.response.body", **part})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"end"})

    async def _wait(self, path: str, receive: Receive, send: Send) -> None:
        if path == "/stream":
            head = {"status": 200, "headers": [], "probe": b":\n\n"}
            await send({"type": "http.response.start", **head})
            await send({"type": "http.response.body", "body": b"one\n", "more_body": True})
        gone = asyncio.ensure_future(receive())
        gate = asyncio.create_task(self.gate.wait())
        self.waiting += 1
        await asyncio.wait({gone, gate}, return_when=asyncio.FIRST_COMPLETED)
        self.waiting -= 1
        if gone.done():
            assert gone.result() == {"type": "http.disconnect"}
            self.left.append(path)
        elif path == "/stream":
            await send({"type": "http.response.body", "body": b"two\n"})
        else:
            await send_bytes(send, 200, b"waited")
        for task in (gone, gate):
            task.cancel()

    def abort_all(self) -> None:
        """Nothing ends them but the gate."""

    def close(self) -> None:
        """Nothing is held."""


@asynccontextmanager
async def echoing(**limits: float) -> AsyncGenerator[tuple[Echo, int]]:
    """Serve; yield the application and its port."""
    http = msgspec.structs.replace(HttpConfig(), **limits)
    app = Echo()
    server = ApiServer(app, "127.0.0.1", 0, http=http, clock=SystemClock())
    server.start()
    try:
        yield app, server.port
    finally:
        app.gate.set()
        await server.stop(drain_s=5.0)


def get(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    """Return a request without a body."""
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: x", *headers, "", ""]).encode()


async def expect_echo(client: RawClient, body: bytes) -> None:
    """Read one answer, which must be this."""
    answer = await client.answer()
    assert (answer.status, answer.body) == (200, body)
