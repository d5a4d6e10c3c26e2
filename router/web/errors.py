"""One shape for every error, the framework's own included."""

from __future__ import annotations

import math

import msgspec

from core.errors import RequestError
from router.web.asgi import JSON, Headers

_MAX_RETRY_AFTER_S = 60
_RETRIABLE = (429, 503)


def error_body(error: RequestError) -> bytes:
    """Return `{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_headers(error: RequestError) -> Headers:
    """Return the headers of an error; 429 and 503 say when to try again, at most 60 s from now."""
    headers: list[tuple[bytes, bytes]] = [JSON]
    if error.status in _RETRIABLE:
        seconds = min(max(math.ceil(error.retry_after_s or 1), 1), _MAX_RETRY_AFTER_S)
        headers.append((b"retry-after", str(seconds).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def error_event(error: RequestError) -> bytes:
    """Return an error as the last event of a stream."""
    return b"data: " + error_body(error) + b"\n\n"


def not_found(path: str) -> RequestError:
    """Return the 404 of an unknown route."""
    return RequestError(
        f"{path}: no such route; /docs shows all of them", status=404, code="not_found"
    )


def method_not_allowed(method: str, path: str) -> RequestError:
    """Return the 405 of a known route."""
    msg = f"{method} {path}: this method is not allowed here"
    return RequestError(msg, status=405, code="method_not_allowed")


def internal_error() -> RequestError:
    """Return the 500 that tells a client nothing of our insides."""
    return RequestError("internal error", status=500, code="internal_error")
