"""An HTTP/1.1 load client that costs little: raw asyncio, one kept connection a client, each with
one request at a time.

It does not parse JSON; it counts events and knows where answers end.
"""

from __future__ import annotations

import asyncio
import random
from typing import cast

import msgspec

from bench.router_pace import lateness_s
from core.clock import SystemClock

PROMPT = "The river runs past the old stone market, and every winter the captain writes a letter."

_HEAD_END = b"\r\n\r\n"
_CHUNKS_END = b"0\r\n\r\n"
_EVENT = b"data: {"
_TAIL_BYTES = 512
_clock = SystemClock()


class Load(msgspec.Struct, frozen=True):
    """What clients ask for, over and over.

    Attributes:
        tokens: least and most tokens of an answer, drawn for each.
        pace_us: between the tokens of a stream; 0: as fast as it goes.
        seconds: no request begins later.
    """

    clients: int
    tokens: tuple[int, int]
    seconds: float
    stream: bool = False
    pace_us: int = 0
    chat: bool = False

    @property
    def pace_s(self) -> float:
        """The same in seconds."""
        return 1e-6 * self.pace_us

    @property
    def spread_s(self) -> float:
        """Between the first requests of two clients: all begin within the time of one stream, so
        that streams end one by one, as they would in life."""
        return self.tokens[1] * self.pace_s / self.clients


class Measured(msgspec.Struct):
    """What came of it; times in seconds.

    Attributes:
        seconds: until the last answer.
        ttft: of each request.
        lateness: of chunks after the first, against the grid on which workers send.
    """

    num_requests: int = 0
    num_chunks: int = 0
    seconds: float = 0.0
    ttft: list[float] = msgspec.field(default_factory=list[float])
    lateness: list[float] = msgspec.field(default_factory=list[float])


def bodies(load: Load, model: str) -> list[bytes]:
    """Return a request's JSON for each number of tokens."""
    least, most = load.tokens
    text = {"messages": [{"role": "user", "content": PROMPT}]} if load.chat else {"prompt": PROMPT}
    shared = {"model": model, **text, "temperature": 0, "ignore_eos": True}
    if load.stream:
        shared["stream"] = True
    if load.pace_us:
        shared["priority"] = load.pace_us
    return [
        msgspec.json.encode({**shared, "max_tokens": count}) for count in range(least, most + 1)
    ]


async def run_load(load: Load, *, port: int, model: str) -> Measured:
    """Run all clients until their time is over and their answers are complete.

    Raises:
        RuntimeError: an answer was not 200, or a connection was closed.
    """
    measured = Measured()
    path = "/v1/chat/completions" if load.chat else "/v1/completions"
    requests = [_request(path, body) for body in bodies(load, model)]
    loop = asyncio.get_running_loop()
    started = _clock.now()
    clients: list[_Client] = []
    for number in range(load.clients):
        client = _Client(load, requests, started + load.seconds, measured, number)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
        clients.append(client)
    for number, client in enumerate(clients):
        loop.call_later(number * load.spread_s, client.begin)
    await asyncio.gather(*(client.ended for client in clients))
    measured.seconds = _clock.now() - started
    return measured


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


class _Client(asyncio.Protocol):
    """One client: a request whenever its last answer is complete."""

    def __init__(
        self, load: Load, requests: list[bytes], until: float, measured: Measured, seed: int
    ) -> None:
        self._load = load
        self._requests = requests
        self._until = until
        self._measured = measured
        self._dice = random.Random(seed)  # noqa: S311 - lengths, not secrets
        self._transport: asyncio.Transport
        self._head = b""
        self._to_come: int | None = None  # bytes of the body; None: it is chunked
        self._tail = b""
        self._sent_at = 0.0
        self._is_first = True
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"the connection was closed: {exc}"))

    def begin(self) -> None:
        """Send a request, or stop where the time is over."""
        now = _clock.now()
        if now >= self._until:
            self.ended.set_result(None)
            self._transport.close()
            return
        self._sent_at = now
        self._is_first = True
        self._head = self._tail = b""
        at = int(self._dice.random() * len(self._requests))
        self._transport.write(self._requests[at])

    def data_received(self, data: bytes) -> None:
        now = _clock.now()
        if not self._head.endswith(_HEAD_END):
            head, found, data = (self._head + data).partition(_HEAD_END)
            self._head = head + found
            if not found:
                return
            self._read_head()
        self._take_body(data, now)

    def _read_head(self) -> None:
        _, has_length, rest = self._head.lower().partition(b"content-length: ")
        self._to_come = int(rest.split(b"\r\n")[0]) if has_length else None

    def _take_body(self, data: bytes, now: float) -> None:
        num_events = data.count(_EVENT) if self._load.stream else 0
        self._measured.num_chunks += num_events
        if num_events and self._is_first:
            self._is_first = False
            self._measured.ttft.append(now - self._sent_at)
        elif num_events and self._load.pace_us:
            self._measured.lateness.append(lateness_s(self._load.pace_s, now))
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._to_come is not None:
            self._to_come -= len(data)
        if self._to_come == 0 or (self._to_come is None and self._tail.endswith(_CHUNKS_END)):
            self._answered(now)

    def _answered(self, now: float) -> None:
        if not self._head.startswith(b"HTTP/1.1 200"):
            self.ended.set_exception(RuntimeError((self._head + self._tail).decode()))
            self._transport.abort()
            return
        if not self._load.stream:
            self._measured.ttft.append(now - self._sent_at)
        self._measured.num_requests += 1
        self.begin()
