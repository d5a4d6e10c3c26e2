"""HTTP/1.1 as bytes on a socket: framing, order, and what is no HTTP."""

from __future__ import annotations

import asyncio

import pytest

from router.web.request_parser import MAX_HEAD_BYTES
from tests.echo_server import echoing, expect_echo, get
from tests.raw_http import raw_client
from tests.router_server import ON_UVLOOP, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that the router process runs on."""
    return ON_UVLOOP


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


async def test_bytes_one_by_one() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        head = b"POST /slow HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        for byte in head + b"2\r\nab\r\n0\r\n\r\n":
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
            b"POST /up HTTP/1.1\r\nhost: x\r\n"
            + upgrade
            + b"content-length: 3\r\n\r\nabc"
            + get("/x")
        )
        await expect_echo(client, b"POST /up?")
        await expect_echo(client, b"GET /x?")
        client.send(
            b"GET /ws HTTP/1.1\r\nhost: x\r\n" + upgrade.replace(b"h2c", b"websocket") + b"\r\n"
        )
        await expect_echo(client, b"GET /ws?")


async def test_an_upgrade_that_is_not_made_changes_nothing_else() -> None:
    async with echoing() as (_, port):
        for version in ("1.0", "1.1"):
            async with raw_client(port) as client:
                asking = ("upgrade: x", "connection: Upgrade, close")
                client.send(get("/up", *asking, version=version) + get("/never"))
                answer = await client.answer()
                assert (answer.body, answer.headers["connection"]) == (b"GET /up?", "close")
                assert await client.has_ended()


# Framings that two parsers in a row could read differently: one of them would take a body for a
# request, and give its answer to somebody else's.
SMUGGLED = [
    b"content-length: 3\r\ncontent-length: 3",
    b"content-length: 3, 3",
    b"content-length: +3",
    b"content-length : 3",
    b"content-length:\r\n 3",
    b"content-length: 3\r\ntransfer-encoding: chunked",
    b"transfer-encoding: chunked\r\ncontent-length: 3",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
    b"transfer-encoding: chunked, identity",
    b"transfer-encoding: xchunked",
    b"transfer-encoding:\x0bchunked",
    b"transfer-encoding:\r\n chunked",
    b"a: b\r\n c",
    b"a: b\nc: d",
    b"a: b\rc: d",
    b"a: b\0",
    b" a: b",
    b"a b: c",
    b"connection: upgrade\r\nupgrade: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked",
]


@pytest.mark.parametrize("lines", SMUGGLED)
async def test_ambiguous_framing_is_refused(lines: bytes) -> None:
    await expect_refused(b"POST /first HTTP/1.1\r\nhost: x\r\n" + lines + b"\r\n\r\n")


@pytest.mark.parametrize(
    "chunk", [b"3\nabc\n", b"0x3\r\nabc\r\n", b"3 \r\nabc\r\n", b"3\r\nabcd\r\n"]
)
async def test_ambiguous_chunks_are_refused(chunk: bytes) -> None:
    await expect_refused(
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunk
    )


async def expect_refused(raw: bytes) -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(raw + b"0\r\n\r\n" + get("/smuggled"))
        answer = await client.answer()
        assert (answer.status, answer.error()["code"]) == (400, "malformed_request")
        client.writer.write_eof()
        assert await client.has_ended()


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"host: a\r\nhost: a\r\n",
        b"host: a b\r\n",
        b"host: a, b\r\nHost: c\r\n",
        b"host: u@a\r\n",
        b"host: a/b\r\n",
        b"host: \xc3\xa9\r\n",
        b"connection: upgrade\r\nupgrade: h2c\r\n",
    ],
)
async def test_a_request_names_one_host(lines: bytes) -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(b"GET / HTTP/1.1\r\n" + lines + b"\r\n" + get("/never"))
        answer = await client.answer()
        assert (answer.status, answer.error()["code"]) == (400, "invalid_host")
        assert b"never" not in await client.rest()


async def test_hosts_of_every_shape() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        for host in ("", "a", "A.b:80", "127.0.0.1:8000", "[::1]:80", "my_host-1.x", "%41", "a "):
            client.send(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            await expect_echo(client, b"GET /?")
        client.send(b"GET /old HTTP/1.0\r\n\r\n")
        await expect_echo(client, b"GET /old?")


async def test_targets_of_proxies() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        for target, seen in (
            ("http://h/a?b", "/a?b"),
            ("http://h", "/?"),
            ("http://h?a=/b", "/?a=/b"),
            ("http://h/a#b", "/a?"),
            ("/a?b=c://d", "/a?b=c://d"),
            ("/%41%2F#z", "/A/?"),
        ):
            client.send(get(target))
            await expect_echo(client, f"GET {seen}".encode())
        client.send(get("*", method="OPTIONS"))
        await expect_echo(client, b"OPTIONS *?")


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_request"),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed_request"),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n folded\x00\r\n\r\n", 400, "malformed_request"),
        (b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n", 400, "malformed_request"),
        (
            b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
            400,
            "malformed_request",
        ),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400, "malformed_request"),
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 405, "method_not_allowed"),
        (b"GET / HTTP/2.0\r\n\r\n", 505, "http_version"),
        (b"GET /\r\n\r\n", 505, "http_version"),  # HTTP/0.9
        (b"GET /" + b"x" * MAX_HEAD_BYTES, 431, "request_header_too_large"),
        (
            b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * MAX_HEAD_BYTES,
            431,
            "request_header_too_large",
        ),
        (
            b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * (MAX_HEAD_BYTES // 6 + 1) + b"\r\n",
            431,
            "request_header_too_large",
        ),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
            + b"a: b\r\n" * (MAX_HEAD_BYTES // 5),
            431,
            "request_header_too_large",
        ),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\na: "
            + b"x" * (2 * MAX_HEAD_BYTES),
            431,
            "request_header_too_large",
        ),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;"
            + b"x" * (2 * MAX_HEAD_BYTES),
            431,
            "request_header_too_large",
        ),
        (b"GET / HTTP/1.1\r\nhost: x", 400, "incomplete_request"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nab", 400, "incomplete_request"),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
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
        client.send(
            b"POST /t HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: y\r\n\r\n"
        )
        await expect_echo(client, b"POST /t?")


async def test_expect_100_continue() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        head = b"POST /e HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
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
        client.send(b"POST /unread HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"unread", "close")
        for _ in range(32):  # it is taken, and dropped: the answer was not lost by a reset
            client.send(chunk)
            await client.writer.drain()
        client.writer.write_eof()
        assert await client.has_ended()


async def test_a_defect_of_the_application_is_a_500_or_the_end() -> None:
    async with echoing() as (_, port), raw_client(port) as client:
        client.send(get("/broken"))
        answer = await client.answer()
        assert (answer.status, answer.error()["code"]) == (500, "internal_error")
        assert b"secret" not in answer.body
        client.send(get("/silent"))
        assert await client.has_ended()
