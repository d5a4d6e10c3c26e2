"""A TCP proxy that delivers everything late, in order: the other end of the world on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

CHUNK = 1 << 16


class SlowProxy:
    """Listens at `endpoint` for as long as `slow_proxy` is open.

    Args:
        delay_s: each way.
    """

    def __init__(self, upstream: str, delay_s: float) -> None:
        self._host, _, port = upstream.rpartition(":")
        self._port = int(port)
        self._delay_s = delay_s
        self.endpoint = ""
        self.tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()  # as far as a client can tell, nobody is there
            return
        for pair in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(self._carry(*pair))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            data = b"begin"
            while data:
                try:
                    data = await reader.read(CHUNK)
                except ConnectionError:
                    data = b""
                late.put_nowait((loop.time() + self._delay_s, data))

        reading = asyncio.create_task(read())
        try:
            while True:
                due, data = await late.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    return
                writer.write(data)
        finally:
            reading.cancel()
            writer.close()


@contextlib.asynccontextmanager
async def slow_proxy(upstream: str, delay_s: float) -> AsyncGenerator[SlowProxy]:
    """Yield a proxy to host:port, which need not be there yet."""
    proxy = SlowProxy(upstream, delay_s)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy.endpoint = f"{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(proxy.tasks):
            task.cancel()
        await asyncio.gather(*proxy.tasks, return_exceptions=True)
