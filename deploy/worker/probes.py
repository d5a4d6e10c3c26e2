"""What a worker serves over HTTP: metrics and health, nothing that costs a step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from core.errors import RequestError
from router.web.asgi import Receive, Scope, Send, refuse_what_is_no_request, send_bytes
from router.web.errors import error_body, error_headers

_READY = {"status": "ready"}


class WorkerApp:
    """ASGI application with `/metrics`, `/health`, `/health/live` and `/health/ready`.

    Args:
        refresh: brings what `registry` shows up to date; awaited before each scrape.
        obstacle: says why the worker is not ready, see `deploy.worker.health`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        refresh: Callable[[], Awaitable[None]],
        obstacle: Callable[[], Awaitable[str]],
    ) -> None:
        self._registry = registry
        self._refresh = refresh
        self._obstacle = obstacle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        del receive
        try:
            refuse_what_is_no_request(scope)
            await self._answer(scope["path"], send)
        except RequestError as error:
            await send_bytes(send, error.status, error_body(error), error_headers(error))

    async def _answer(self, path: str, send: Send) -> None:
        match path:
            case "/metrics":
                await self._refresh()
                headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
                await send_bytes(send, 200, generate_latest(self._registry), headers)
            case "/health" | "/health/live":
                await send_bytes(send, 200, b'{"status":"alive"}')
            case "/health/ready":
                reason = await self._obstacle()
                said = {"status": "not ready", "reason": reason} if reason else _READY
                await send_bytes(send, 503 if reason else 200, msgspec.json.encode(said))
            case _:
                message = f"unknown route {path}: a worker serves /metrics and /health"
                raise RequestError(message, status=404, code="not_found")

    def abort_all(self) -> None:
        """Nothing here runs for longer than an answer."""

    def close(self) -> None:
        """Nothing is held."""
