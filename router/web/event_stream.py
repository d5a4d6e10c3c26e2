"""Server-sent events on plain ASGI: nothing leaves before the first event, or 15 s of silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from core.clock import Clock
from router.web.asgi import Headers, Send

_COMMENT = b": the model is working\n\n"
_PROBE = b":\n\n"
"""A comment too, by which the server finds out whether a client that stopped sending is there."""

_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """One stream. Its head goes out with its first bytes, so that a refusal keeps its status.

    Args:
        silence_s: after so long without an event, comment lines keep proxies from closing.
    """

    def __init__(self, send: Send, clock: Clock, silence_s: float, headers: Headers = ()) -> None:
        self._send = send
        self._clock = clock
        self._silence_s = silence_s
        self._headers = [*_HEADERS, *headers]
        self._last = clock.now()
        self._next_look: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self.has_started = False

    def write(self, data: bytes, *, last: bool = False) -> Awaitable[None]:
        """Send whole events; `last` ends the stream."""
        if last:
            self.close()  # a client may take long to read the end, and no comment may follow it
        self._last = self._clock.now()
        if not self.has_started:
            return self._write_first(data, last=last)
        return self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _write_first(self, data: bytes, *, last: bool) -> None:
        self.has_started = True
        head = {"status": 200, "headers": self._headers, "probe": _PROBE}
        await self._send({"type": "http.response.start", **head})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _write_comment(self) -> None:
        await self.write(_COMMENT)

    def keep_alive(self) -> None:
        """Send comment lines into silence, from now until `close`."""
        loop = asyncio.get_running_loop()
        silent_for = self._clock.now() - self._last
        if silent_for >= self._silence_s:
            silent_for = 0.0
            if self._comment is None or self._comment.done():  # else the client does not read
                self._comment = loop.create_task(self._write_comment())
        self._next_look = loop.call_later(self._silence_s - silent_for, self.keep_alive)

    def close(self) -> None:
        """No comments from now on."""
        if self._next_look is not None:
            self._next_look.cancel()
        if self._comment is not None:
            self._comment.cancel()
