"""The few things that a plain ASGI endpoint needs: the request's head and body, a JSON answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from core.errors import RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")

WHEN_GONE = "dovetail.when_gone"
"""The server's own word in a scope: see `Exchange.when_gone`."""


class ClientGone(Exception):  # noqa: N818 - a state of the connection, no error of ours
    """The client left before its answer was complete."""


def refuse_what_is_no_request(scope: Mapping[str, Any]) -> None:
    """Raise what the server has against the bytes that it got in a request's place."""
    refusal: RequestError | None = scope.get("refusal")
    if refusal is not None:
        raise refusal


def header(scope: Mapping[str, Any], name: bytes) -> str | None:
    """Return the first header of this (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


async def read_body(scope: Mapping[str, Any], receive: Receive, max_bytes: int) -> bytes:
    """Return the request's body.

    Raises:
        RequestError: 413, as soon as it is known to be longer than `max_bytes`; 400 or 408 for one
            that ended early, is malformed or does not come.
        ClientGone: the client left in the middle of it.
    """
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            reason: RequestError | None = message.get("reason")
            raise reason or ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def check_json_content(scope: Mapping[str, Any]) -> None:
    """Refuse a body that says it is something else than JSON with 415; saying nothing is fine."""
    content_type = header(scope, b"content-type")
    if content_type is None:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        msg = f"content-type = {kind!r}: must be application/json"
        raise RequestError(msg, status=415, code="unsupported_media_type")


async def send_bytes(send: Send, status: int, body: bytes, headers: Headers = (JSON,)) -> None:
    """Send a whole answer."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


def _too_large(max_bytes: int) -> RequestError:
    msg = f"the body is too large: at most {max_bytes} bytes"
    return RequestError(msg, status=413, code="request_too_large")
