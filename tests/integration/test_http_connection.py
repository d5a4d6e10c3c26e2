"""HTTP/1.1 as bytes on a socket, against the server alone with a small application."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import cast

import msgspec
import pytest

from core.clock import SystemClock
from core.config import HttpConfig
from core.errors import RequestError
from router.web import connection
from router.web.asgi import (
    Receive,
    Scope,
    Send,
    read_body,
    refuse_what_is_no_request,
    send_bytes,
)
from router.web.errors import error_body, error_headers
from router.web.request_parser import MAX_HEAD_BYTES
from router.web.server import ApiServer
from tests.raw_http import RawClient, raw_client
from tests.router_server import ON_UVLOOP, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that the router process runs on."""
    return ON_UVLOOP


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


async def test_requests_follow_each_other_on_a_connection() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        for at in range(3):
            client.send(get(f"/a{at}?x=%20&y"))
            await expect_echo(client, f"GET /a{at}?x=%20&y".encode())


async def test_pipelined_requests_are_answered_in_order() -> None:
    count = 300  # more than are taken at a time
    async with echoing() as (app, port), raw_client(port) as client:
        client.send(get("/wait") + b"".join(get(f"/{at}") for at in range(count)))
        await until(lambda: app.waiting == 1)
        app.gate.set()
        await expect_echo(client, b"waited")
        for at in range(count):
            await expect_echo(client, f"GET /{at}?".encode())
        client.send(get("/last", "connection: close") + get("/never"))
        await expect_echo(client, b"GET /last?")
        assert await client.has_ended()


async def test_pipelined_bodies_keep_apart() -> None:
    post = b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000
    async with echoing() as (app, port), raw_client(port) as client:
        client.send(get("/wait") + b"".join(post % at for at in range(5)))
        await until(lambda: app.waiting == 1)
        app.gate.set()
        await expect_echo(client, b"waited")
        for at in range(5):
            await expect_echo(client, f"POST /{at}?".encode())


async def test_a_pipelining_client_that_leaves_is_seen_by_the_answer_in_progress() -> None:
    async with echoing() as (app, port), raw_client(port) as client:
        client.send(get("/wait") + get("/wait"))
        await until(lambda: app.waiting == 1)
        client.writer.close()
        await until(lambda: app.left == ["/wait"])


async def test_a_client_that_is_gone_is_seen_behind_requests_that_were_not_read() -> None:
    async with echoing() as (app, port), raw_client(port) as client:
        client.send(get("/wait") + get("/x") * 100_000)
        await until(lambda: app.waiting == 1)
        client.writer.transport.abort()
        await until(lambda: app.left == ["/wait"])


async def test_a_client_that_does_not_read_stops_its_answer_alone() -> None:
    async with (
        echoing() as (app, port),
        raw_client(port, receive_buffer=4096) as slow,
        raw_client(port) as client,
    ):
        cast("asyncio.ReadTransport", slow.writer.transport).pause_reading()
        slow.send(get("/flood"))
        sent = -1
        while app.num_sent != sent:  # it comes to a halt
            sent = app.num_sent
            for _ in range(20):
                client.send(get("/a"))
                await expect_echo(client, b"GET /a?")
        assert 0 < sent <= 8, "more than the kernel and one buffer hold"
        app.gate.set()
        cast("asyncio.ReadTransport", slow.writer.transport).resume_reading()
        answer = await slow.answer()
        assert len(answer.body) == (sent << 16) + len("end")


async def test_a_client_that_does_not_read_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "router.web.connection")
    async with (
        echoing(send_timeout_s=0.1) as (app, port),
        raw_client(port, receive_buffer=4096) as slow,
    ):
        cast("asyncio.ReadTransport", slow.writer.transport).pause_reading()
        slow.send(get("/flood"))
        await until(lambda: "took nothing for 0.1 s" in caplog.text)
        sent = app.num_sent
        await until(lambda: app.num_sent > sent)  # what is sent goes nowhere, and is not waited for


async def test_bytes_one_by_one() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        for (
            byte
        ) in b"POST /slow HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n":
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        await expect_echo(client, b"POST /slow?")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/echo", "/stream"])
async def test_old_clients_get_the_body_until_the_end(path: str, version: str) -> None:
    async with echoing() as (app, port), raw_client(port) as client:
        app.gate.set()
        client.send(get(path, "connection: close", version=version))
        answer = await client.answer()
        assert answer.headers["connection"] == "close"
        is_chunked = version == "1.1" and path == "/stream"
        assert (answer.headers.get("transfer-encoding") == "chunked") == is_chunked
        assert answer.body == (b"one\ntwo\n" if path == "/stream" else b"GET /echo?")
        assert await client.has_ended()


async def test_head_has_the_length_and_no_body() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(get("/x", method="HEAD") + get("/y"))
        answer = await client.answer(to_head=True)
        assert answer.headers["content-length"] == str(len("HEAD /x?"))
        assert answer.headers["date"].endswith(" GMT")
        await expect_echo(client, b"GET /y?")


async def test_an_upgrade_is_not_made_and_its_body_not_lost() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n"
        client.send(
            b"POST /up HTTP/1.1\r\n" + upgrade + b"content-length: 3\r\n\r\nabc" + get("/x")
        )
        await expect_echo(client, b"POST /up?")
        await expect_echo(client, b"GET /x?")
        client.send(b"GET /ws HTTP/1.1\r\n" + upgrade.replace(b"h2c", b"websocket") + b"\r\n")
        await expect_echo(client, b"GET /ws?")


async def test_targets_of_proxies() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        for target, seen in (("http://h/a?b", "/a?b"), ("http://h", "/?"), ("/%41%2F#z", "/A/?")):
            client.send(get(target))
            await expect_echo(client, f"GET {seen}".encode())
        client.send(get("*", method="OPTIONS"))
        await expect_echo(client, b"OPTIONS *?")


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_request"),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed_request"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\na: b\r\n folded\x00\r\n\r\n", 400, "malformed_request"),
        (b"BREW / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
        (
            b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
            400,
            "malformed_request",
        ),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400, "malformed_request"),
        (b"CONNECT x:443 HTTP/1.1\r\n\r\n", 405, "method_not_allowed"),
        (b"GET / HTTP/2.0\r\n\r\n", 505, "http_version"),
        (b"GET /\r\n\r\n", 505, "http_version"),  # HTTP/0.9
        (b"GET /" + b"x" * MAX_HEAD_BYTES, 431, "request_header_too_large"),
        (b"GET / HTTP/1.1\r\na: " + b"x" * MAX_HEAD_BYTES, 431, "request_header_too_large"),
        (
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEAD_BYTES // 6 + 1) + b"\r\n",
            431,
            "request_header_too_large",
        ),
        (
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
            + b"a: b\r\n" * (MAX_HEAD_BYTES // 5),
            431,
            "request_header_too_large",
        ),
        (b"GET / HTTP/1.1\r\nhost: x", 400, "incomplete_request"),
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nab", 400, "incomplete_request"),
        (
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
            400,
            "malformed_request",
        ),
    ],
)
async def test_what_is_no_http_is_told_so_in_its_turn(raw: bytes, status: int, code: str) -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(get("/first") + raw)
        client.writer.write_eof()
        await expect_echo(client, b"GET /first?")
        answer = await client.answer()
        assert (answer.status, answer.error()["code"]) == (status, code)
        assert answer.headers["connection"] == "close"
        assert await client.has_ended()


async def test_trailers_of_usual_size_are_dropped() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(b"POST /t HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: y\r\n\r\n")
        await expect_echo(client, b"POST /t?")


@pytest.mark.parametrize("path", ["/wait", "/stream"])
async def test_a_client_that_only_stopped_sending_gets_its_answer(path: str) -> None:
    async with echoing() as (app, port), raw_client(port) as client:
        client.send(get(path))
        client.writer.write_eof()
        await until(lambda: app.waiting == 1)
        if path == "/wait":
            assert (await client.head())[0] == 100  # the probe: is it there?
            app.gate.set()
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"waited")
        else:
            assert (await client.head())[0] == 200
            chunks = client.chunks()
            assert [await anext(chunks), await anext(chunks)] == [b"one\n", b":\n\n"]
            app.gate.set()
            assert b"".join([one async for one in chunks if one != b":\n\n"]) == b"two\n"
        assert app.left == []
        assert await client.has_ended()


@pytest.mark.parametrize("path", ["/wait", "/stream"])
@pytest.mark.parametrize("manner", ["close", "reset", "half, then reset"])
async def test_a_client_that_is_gone_is_seen_to_be(path: str, manner: str) -> None:
    async with echoing() as (app, port), raw_client(port) as client:
        client.send(get(path))
        if manner.startswith("half"):
            client.writer.write_eof()
        await until(lambda: app.waiting == 1)
        assert app.left == []
        if manner != "close":
            linger = struct.pack("ii", 1, 0)
            sock: socket.socket = client.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.writer.close()
        await until(lambda: app.left == [path])


async def test_an_old_client_that_stops_sending_has_left() -> None:
    """Nothing can be sent to HTTP/1.0 before its answer, so nobody could ask."""
    async with echoing() as (app, port), raw_client(port) as client:
        client.send(get("/wait", version="1.0"))
        client.writer.write_eof()
        await until(lambda: app.left == ["/wait"])


async def test_an_idle_connection_closes_with_its_client() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(get("/a"))
        await expect_echo(client, b"GET /a?")
        client.writer.write_eof()
        assert await client.has_ended()


async def test_expect_100_continue() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        head = b"POST /e HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        client.send(head)
        assert (await client.head())[2] == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"ab")
        await expect_echo(client, b"POST /e?")
        client.send(head + b"ab")
        answer = await client.answer()
        assert (answer.body, answer.interim) == (b"POST /e?", []), "the body was there already"
        client.send(head.replace(b"/e", b"/unread"))
        answer = await client.answer()
        assert (answer.body, answer.interim) == (b"unread", [])
        assert answer.headers["connection"] == "close", "the body may follow, or may not"


async def test_an_answer_before_the_body_s_end_arrives() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(b"POST /unread HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"unread", "close")
        for _ in range(32):  # it is taken, and dropped: the answer was not lost by a reset
            client.send(chunk)
            await client.writer.drain()
        client.writer.write_eof()
        assert await client.has_ended()


def sends_in_vain(client: RawClient) -> bool:
    """Send one more byte; return whether the connection was reset."""
    client.send(b"x")
    return client.writer.transport.is_closing()


async def test_who_does_not_stop_sending_is_cut_off_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_LINGER_S", 0.2)
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(b"POST /unread HTTP/1.1\r\ncontent-length: 1000\r\n\r\n")
        assert (await client.answer()).body == b"unread"
        assert await client.has_ended(), "the server's half closes at once"
        await until(lambda: sends_in_vain(client))


async def test_a_stop_does_not_wait_for_who_does_not_stop_sending() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(b"POST /unread HTTP/1.1\r\ncontent-length: 1000\r\n\r\n")
        assert (await client.answer()).body == b"unread"
        clock = SystemClock()
        begin = clock.now()
    assert clock.now() - begin < 4.0, "it lingers for 5 s"


@pytest.mark.parametrize(
    ("limit", "sent", "part"),
    [
        ("header_timeout_s", b"GET / HTTP/1.1\r\nhost", "head"),
        ("body_timeout_s", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nab", "body"),
    ],
)
async def test_what_does_not_come_is_not_waited_for(limit: str, sent: bytes, part: str) -> None:
    async with echoing(**{limit: 0.1}) as (_, port), raw_client(port) as client:
        client.send(sent)
        answer = await client.answer()
        assert (answer.status, answer.error()["code"]) == (408, "request_timeout")
        assert f"the request's {part}" in answer.error()["message"]
        client.writer.write_eof()
        assert await client.has_ended()


async def test_an_idle_connection_is_closed_after_a_while() -> None:
    async with echoing(keepalive_timeout_s=0.1) as (_, port), raw_client(port) as client:
        client.send(get("/a"))
        await expect_echo(client, b"GET /a?")
        assert await client.has_ended()
    async with echoing(keepalive_timeout_s=0.1) as (_, port), raw_client(port) as client:
        assert await client.has_ended()


async def test_answers_do_not_time_out() -> None:
    limits = ("keepalive_timeout_s", "header_timeout_s", "body_timeout_s", "send_timeout_s")
    async with echoing(**dict.fromkeys(limits, 0.1)) as (app, port), raw_client(port) as client:
        client.send(get("/wait"))
        await until(lambda: app.waiting == 1)
        await asyncio.sleep(1.2)  # two looks at every connection
        app.gate.set()
        await expect_echo(client, b"waited")


async def test_a_defect_of_the_application_is_a_500_or_the_end() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(get("/broken"))
        answer = await client.answer()
        assert (answer.status, answer.error()["code"]) == (500, "internal_error")
        assert b"secret" not in answer.body
        client.send(get("/silent"))
        assert await client.has_ended()


async def test_a_stop_closes_idle_connections_and_refuses_half_requests() -> None:
    async with echoing() as (_, port), raw_client(port) as idle, raw_client(port) as half:
        idle.send(get("/a"))
        half.send(b"GET /b HT")
        await expect_echo(idle, b"GET /a?")
    assert await idle.has_ended()
    assert await half.has_ended()
