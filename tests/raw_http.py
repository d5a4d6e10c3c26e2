"""A client that sends the bytes it is told to, and reads answers one by one."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple


class RawAnswer(NamedTuple):
    """One answer.

    Attributes:
        interim: heads of the 1xx answers before it.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    interim: list[bytes]

    def error(self) -> dict[str, Any]:
        """Return the error object, after a look at its shape."""
        assert self.headers["content-type"] == "application/json"
        body = json.loads(self.body)
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        return body["error"]


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        """Send these bytes."""
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str], bytes]:
        """Return the next status, headers, and both as they came."""
        raw = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, raw

    async def answer(self, *, to_head: bool = False) -> RawAnswer:
        """Return the next answer, whole.

        Args:
            to_head: of a HEAD request, which has no body whatever its headers say.
        """
        interim: list[bytes] = []
        status, headers, raw = await self.head()
        while status < 200:
            interim.append(raw)
            status, headers, raw = await self.head()
        body = b"" if to_head or status == 204 else await self.body(headers)
        return RawAnswer(status, headers, body, interim)

    async def body(self, headers: Mapping[str, str]) -> bytes:
        """Return the body after a head, whole."""
        return b"".join([part async for part in self.parts(headers)])

    async def parts(self, headers: Mapping[str, str]) -> AsyncGenerator[bytes]:
        """Yield the body after a head: its chunks, or all of it."""
        if headers.get("transfer-encoding") == "chunked":
            async for chunk in self.chunks():
                yield chunk
        elif "content-length" in headers:
            yield await self._reader.readexactly(int(headers["content-length"]))
        else:
            yield await self._reader.read()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the chunks of a body; EOFError where it breaks off."""
        while size := int(await self._reader.readuntil(b"\n"), 16):
            chunk = await self._reader.readexactly(size + 2)
            yield chunk[:-2]
        assert await self._reader.readuntil(b"\n") == b"\r\n"

    async def rest(self) -> bytes:
        """Return what comes until the server closes."""
        return await self._reader.read()

    async def has_ended(self) -> bool:
        """Return whether nothing comes but the end; a reset is one too."""
        try:
            return await self._reader.read() == b""
        except ConnectionResetError:
            return True


@asynccontextmanager
async def raw_client(port: int | None, *, receive_buffer: int = 0) -> AsyncGenerator[RawClient]:
    """Connect to a port of this machine; all within a minute, so that nothing hangs.

    Args:
        receive_buffer: bytes that the kernel holds for a client that does not read; 0: its default.
    """
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    async with asyncio.timeout(60):
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
        try:
            yield RawClient(reader, writer)
        finally:
            writer.transport.abort()
