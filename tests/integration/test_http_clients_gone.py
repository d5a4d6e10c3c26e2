"""Clients that leave, stop sending, stop reading or never stop, and how long each is waited for."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import cast

import pytest

from core.clock import SystemClock
from router.web import connection, server
from router.web.connection import HttpConnection
from tests.echo_server import echoing, expect_echo, get
from tests.raw_http import RawClient, raw_client
from tests.router_server import ON_UVLOOP, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that the router process runs on."""
    return ON_UVLOOP


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


async def test_a_client_that_is_lost_is_not_looked_at_again() -> None:
    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    async with echoing() as (app, port), raw_client(port) as client, raw_client(port) as other:
        client.send(get("/flood"))
        await until(lambda: app.num_sent > 0)
        client.writer.write_eof()
        other.send(get("/a"))
        await expect_echo(other, b"GET /a?")  # so the end of sending was seen, too
        client.writer.transport.abort()
        await asyncio.sleep(2 * connection._FIRST_LOOK_S)
    assert failed == []


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


def sends_in_vain(client: RawClient) -> bool:
    """Send one more byte; return whether the connection was reset."""
    client.send(b"x")
    return client.writer.transport.is_closing()


async def test_who_does_not_stop_sending_is_cut_off_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_LINGER_S", 0.2)
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert (await client.answer()).body == b"unread"
        assert await client.has_ended(), "the server's half closes at once"
        await until(lambda: sends_in_vain(client))


async def test_a_stop_does_not_wait_for_who_does_not_stop_sending() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert (await client.answer()).body == b"unread"
        clock = SystemClock()
        begin = clock.now()
    assert clock.now() - begin < 4.0, "it lingers for 5 s"


@pytest.mark.parametrize(
    ("limit", "sent", "part"),
    [
        ("header_timeout_s", b"GET / HTTP/1.1\r\nhost", "head"),
        ("body_timeout_s", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab", "body"),
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


async def test_idle_connections_are_looked_at_as_rarely_as_their_limits_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[HttpConnection] = []
    check = HttpConnection.check

    def counted(connection: HttpConnection, now: float) -> None:
        looks.append(connection)
        check(connection, now)

    monkeypatch.setattr(HttpConnection, "check", counted)
    monkeypatch.setattr(server, "_CHECK_S", 0.01)
    async with echoing() as (app, port), raw_client(port) as client:
        client.send(get("/a"))
        await expect_echo(client, b"GET /a?")
        await asyncio.sleep(0.1)
        looks.clear()
        await asyncio.sleep(0.3)
        assert len(looks) <= 1
        client.send(get("/wait"))
        await until(lambda: app.waiting == 1)
        await until(lambda: len(looks) >= 5)
        app.gate.set()
        await expect_echo(client, b"waited")


async def test_answers_do_not_time_out() -> None:
    limits = ("keepalive_timeout_s", "header_timeout_s", "body_timeout_s", "send_timeout_s")
    async with echoing(**dict.fromkeys(limits, 0.1)) as (app, port), raw_client(port) as client:
        client.send(get("/wait"))
        await until(lambda: app.waiting == 1)
        await asyncio.sleep(1.2)  # two looks at every connection
        app.gate.set()
        await expect_echo(client, b"waited")


async def test_a_stop_closes_idle_connections_and_refuses_half_requests() -> None:
    async with echoing() as (_, port), raw_client(port) as idle, raw_client(port) as half:
        idle.send(get("/a"))
        half.send(b"GET /b HT")
        await expect_echo(idle, b"GET /a?")
    assert await idle.has_ended()
    assert await half.has_ended()
