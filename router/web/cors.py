"""Cross-origin requests (the Fetch standard's CORS), for the origins of `http.allow_origins`.

No credentials: the API is used with a key in a header, not with cookies.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import RequestError
from router.web.asgi import AsgiApp, Message, Receive, Scope, Send, header, send_bytes
from router.web.errors import error_body, error_headers

_METHODS = (b"access-control-allow-methods", b"GET, HEAD, POST")
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, x-dovetail-ignored, retry-after")
_MAX_AGE = (b"access-control-max-age", b"600")


class Cors:
    """Answers preflights, and lets scripts of allowed origins read the application's answers.

    Args:
        origins: as browsers send them; "*" allows all.
    """

    def __init__(self, app: AsgiApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        origin = header(scope, b"origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        allows = "*" in self._origins or origin in self._origins
        # Without `vary` a cache could hand one origin's answer to another.
        headers = [(b"vary", b"origin")]
        if allows:
            headers.append((b"access-control-allow-origin", origin.encode("latin-1")))
        if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method"):
            await self._preflight(scope, send, headers if allows else None)
            return

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
                if allows:
                    message["headers"].append(_EXPOSED)
            await send(message)

        await self._app(scope, receive, send_with)

    async def _preflight(
        self, scope: Scope, send: Send, headers: list[tuple[bytes, bytes]] | None
    ) -> None:
        if headers is None:
            msg = f"origin = {header(scope, b'origin')!r}: is not one of http.allow_origins"
            error = RequestError(msg, status=403, code="origin_not_allowed")
            await send_bytes(send, error.status, error_body(error), error_headers(error))
            return
        wanted = header(scope, b"access-control-request-headers")
        if wanted:
            headers.append((b"access-control-allow-headers", wanted.encode("latin-1")))
        await send_bytes(send, 204, b"", [*headers, _METHODS, _MAX_AGE])
