"""One client of a chaos run, on a socket of its own: sends a request, reads, or goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chaos_requests import Leaving, Request, Way
from tests.raw_http import RawClient

ANSWER_TIMEOUT_S = 120.0
"""Generous: only a client that would hang runs into it."""


@dataclass
class Told:
    """What came for one choice."""

    prompt: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list[str])
    logprobs: list[float | None] = field(default_factory=list[float | None])


@dataclass
class Answered:
    """What came back, up to its end.

    Attributes:
        status: HTTP's, None until the head came.
        told: by choice.
        num_ends: how often the stream, or the answer, said that it is complete.
        usage: the last `usage` object.
        error: the error object, or why the connection ended.
        path: the `dovetail` object.
        has_left: the client went away before the end.
    """

    status: int | None = None
    told: dict[int, Told] = field(default_factory=dict[int, Told])
    num_ends: int = 0
    usage: dict[str, Any] | None = None
    error: str = ""
    path: dict[str, Any] = field(default_factory=dict[str, Any])
    has_left: bool = False

    def take(self, answer: Mapping[str, Any]) -> None:
        """Take an event, or a whole answer."""
        if "error" in answer:
            self.error = json.dumps(answer["error"])
            return
        self.usage = answer.get("usage") or self.usage
        self.path = answer.get("dovetail") or self.path
        for choice in answer["choices"]:
            told = self.told.setdefault(choice["index"], Told())
            prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            told.prompt = tuple(prompt or told.prompt)
            told.token_ids += choice.get("token_ids") or []
            told.text += _text_of(choice)
            told.logprobs += _logprobs_of(choice.get("logprobs"))
            if choice["finish_reason"] is not None:
                told.finish_reasons.append(choice["finish_reason"])


async def ask(port: int, request: Request, name: str = "") -> Answered:
    """Send a request to a port of this machine, and return what came of it.

    Args:
        name: its `x-request-id`; "": the router makes one.
    """
    answered = Answered()
    sock = socket.socket()
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
    except OSError as error:
        sock.close()
        answered.error = repr(error)
        return answered
    leaves = request.leaves
    message = _message(request, name)
    reading = asyncio.create_task(_exchange(RawClient(reader, writer), request, message, answered))
    try:
        timeout_s = leaves.after_s if leaves else ANSWER_TIMEOUT_S
        await asyncio.wait({reading}, timeout=timeout_s)
        if reading.done():
            reading.result()
        elif leaves:
            answered.has_left = True
        else:
            answered.error = f"nothing more within {timeout_s:g} s"
    except (OSError, EOFError) as error:
        answered.error = answered.error or repr(error)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        _close(sock, writer, leaves)
    return answered


def _close(sock: socket.socket, writer: asyncio.StreamWriter, leaves: Leaving | None) -> None:
    if leaves and leaves.way is Way.RESET:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif leaves:
        with contextlib.suppress(OSError):  # the router was faster
            sock.shutdown(socket.SHUT_RDWR)
    writer.transport.abort()


async def _exchange(
    client: RawClient, request: Request, message: bytes, answered: Answered
) -> None:
    """Put into `answered` what comes; returns at its end, or when it is time to go."""
    leaves = request.leaves
    if leaves and leaves.after_events == 0:
        client.send(message[: len(message) // 2])
        await asyncio.sleep(leaves.after_s)
        answered.has_left = True
        return
    client.send(message)
    if request.closes_half:
        client.writer.write_eof()
    status, headers, _ = await client.head()
    while status < 200:
        status, headers, _ = await client.head()
    answered.status = status
    if not request.is_stream or status != 200:
        answered.take(json.loads(await client.body(headers)))
        answered.num_ends += 1
        return
    num_events = 0
    async for event in _events(client, headers):
        num_events += 1
        if leaves and num_events > leaves.after_events:
            answered.has_left = True
            return
        if event == b"[DONE]":
            answered.num_ends += 1
        else:
            answered.take(json.loads(event))


def _message(request: Request, name: str) -> bytes:
    body = json.dumps(request.body).encode()
    lines = (
        f"POST {request.path} HTTP/1.1",
        "host: chaos",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-dovetail-disaggregate: {request.disaggregate}",
        "x-dovetail-trace: 1",
        *((f"x-request-id: {name}",) if name else ()),
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def _events(client: RawClient, headers: Mapping[str, str]) -> AsyncGenerator[bytes]:
    """Yield the data of server-sent events; comments are left out."""
    pending = b""
    async for chunk in client.parts(headers):
        *whole, pending = (pending + chunk).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield event.removeprefix(b"data: ")
    assert not pending, pending


def _text_of(choice: Mapping[str, Any]) -> str:
    spoken = choice.get("delta") or choice.get("message")
    return (spoken["content"] if spoken else choice["text"]) or ""


def _logprobs_of(logprobs: Mapping[str, Any] | None) -> list[float | None]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    return logprobs["token_logprobs"]
