"""Many connections and slow readers against a router process: its memory stays flat."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

import httpx
import psutil
import pytest

from router.web.server import raise_open_file_limit
from tests.figures import Figures
from tests.raw_http import RawClient, raw_client
from tests.router_server import ON_UVLOOP

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MIB = 1 << 20
PATH = "/v1/completions"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that the router process runs on."""
    return ON_UVLOOP


class Router:
    """A child that floods."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.flooding_router", "http.send_timeout_s=600"]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        self.port = int(self._child.stdout.readline())
        self._process = psutil.Process(self._child.pid)

    def close(self) -> None:
        self._child.communicate()
        assert self._child.returncode == 0

    def resident_bytes(self) -> int:
        return self._process.memory_info().rss

    def num_open(self) -> int:
        return self._process.num_fds()

    def client(self) -> httpx.AsyncClient:
        """Return a client; its limits are generous, since the machine may be busy."""
        base = f"http://127.0.0.1:{self.port}"
        return httpx.AsyncClient(base_url=base, trust_env=False, timeout=60)

    async def counts(self, client: httpx.AsyncClient) -> dict[str, int]:
        return (await client.get("/status")).json()["requests"]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what another process does, at most a minute."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - it has no event for us
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    """Yield one for all tests."""
    router = Router()
    yield router
    router.close()


def request_of(body: str) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


async def expect_served(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 50}
    for stream in (False, True):
        answer = await client.post(PATH, json={**body, "stream": stream})
        assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


async def unread(stack: AsyncExitStack, router: Router, count: int, body: str) -> list[RawClient]:
    """Open streams that nobody reads."""
    clients: list[RawClient] = []
    for _ in range(count):
        client = await stack.enter_async_context(raw_client(router.port, receive_buffer=4096))
        cast("asyncio.ReadTransport", client.writer.transport).pause_reading()
        client.send(request_of(body))
        clients.append(client)
    return clients


@pytest.mark.parametrize("prompt", ['"x"', '["x", "y"]'], ids=["one prompt", "two prompts"])
async def test_unread_streams_cost_little(router: Router, figures: Figures, prompt: str) -> None:
    num_prompts = prompt.count("x") + prompt.count("y")
    num_streams, num_tokens = 40, 6000 // num_prompts
    async with router.client() as client, AsyncExitStack() as stack:
        await expect_served(client)
        start = (await router.counts(client))["tokens"]
        before = router.resident_bytes()
        body = f'{{"prompt": {prompt}, "stream": true, "max_tokens": {num_tokens}}}'
        await unread(stack, router, num_streams, body)

        async def have_come() -> bool:
            return (await router.counts(client))["tokens"] >= start + num_streams * 6000

        await until(have_come)
        await expect_served(client)
        assert (await router.counts(client))["open"] == num_streams * num_prompts
        more = router.resident_bytes() - before
        figures(f"40 unread streams of 6000 tokens: {more / MIB:.1f} MiB more")
        assert more < 20 * MIB, "as events they are 200 bytes a token: 46 MiB"
        await stack.aclose()

        async def are_let_go() -> bool:
            return not (await router.counts(client))["open"]

        await until(are_let_go)


async def test_ten_thousand_idle_connections(router: Router, figures: Figures) -> None:
    raise_open_file_limit()
    count = 10_000
    async with router.client() as client:
        await expect_served(client)
        before, num_open = router.resident_bytes(), router.num_open()
        idle = await connect(router.port, count)
        try:

            async def are_there() -> bool:
                return router.num_open() >= num_open + count

            await until(are_there)
            await expect_served(client)
            each = (router.resident_bytes() - before) / count
            figures(f"{count} idle connections: {each / 1024:.1f} KiB of the router's memory each")
            assert each < 16 * 1024
        finally:
            for writer in idle:
                writer.abort()

        async def are_gone() -> bool:
            return router.num_open() <= num_open

        await until(are_gone)
        await expect_served(client)


async def connect(port: int, count: int) -> Sequence[asyncio.WriteTransport]:
    """Return connections on which one request was answered, and nothing comes any more."""
    loop = asyncio.get_running_loop()
    transports: list[asyncio.WriteTransport] = []
    for _ in range(count):
        transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
        transports.append(transport)
    for transport in transports:
        transport.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    return transports


async def test_large_bodies(router: Router, figures: Figures) -> None:
    """32 MiB are looked at; one byte more is refused before it came."""
    async with router.client() as client:
        await expect_served(client)
        exact = b'{"prompt": "x", "max_tokens": 1, "user": "%s"}'
        exact %= b"u" * (32 * MIB - len(exact) + 2)
        assert len(exact) == 32 * MIB
        headers = {"content-type": "application/json"}
        before = router.resident_bytes()
        for _ in range(3):
            answer = await client.post(PATH, content=exact, headers=headers)
            assert answer.status_code == 200, answer.text[:300]
        wrong = await client.post(PATH, content=exact[:-1] + b" ", headers=headers)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_json")
        more = router.resident_bytes() - before
        figures(f"4 bodies of 32 MiB: {more / MIB:.0f} MiB more")
        assert more < 80 * MIB
    async with raw_client(router.port) as raw:
        raw.send(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            % (PATH.encode(), 32 * MIB + 1)
        )
        answer = await raw.answer()
        assert (answer.status, answer.error()["code"]) == (413, "request_too_large")
        assert answer.headers["connection"] == "close"
    async with raw_client(router.port) as raw:
        raw.send(
            b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % PATH.encode()
        )
        reading = asyncio.create_task(raw.answer())
        sent = 0
        while not reading.done() and sent < 64 * MIB:
            raw.send(b"100000\r\n%b\r\n" % bytes(MIB))
            sent += MIB
            await raw.writer.drain()
        answer = await reading
        assert (answer.status, answer.error()["code"]) == (413, "request_too_large")
        assert sent > 32 * MIB
