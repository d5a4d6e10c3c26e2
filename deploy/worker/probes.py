"""What a worker serves over HTTP: metrics and health, nothing that costs a step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from core.errors import RequestError
from router.web.asgi import Receive, Scope, Send, refuse_what_is_no_request, send_bytes
from router.web.errors import error_body, error_headers


class WorkerApp:
    """ASGI application with `/metrics`, `/health`, `/health/live` and `/health/ready`.

    Args:
        refresh: brings what `registry` shows up to date; awaited before each scrape.
        is_ready: see `deploy.worker.health`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        refresh: Callable[[], Awaitable[None]],
        is_ready: Callable[[], Awaitable[bool]],
    ) -> None:
        self._registry = registry
        self._refresh = refresh
        self._is_ready = is_ready

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
                is_ready = await self._is_ready()
                body = b'{"status":"ready"}' if is_ready else b'{"status":"not ready"}'
                status = 200 if is_ready else 503
                await send_bytes(send, status, body)
            case _:
                message = f"unknown route {path}: a worker serves /metrics and /health"
                raise RequestError(message, status=404, code="not_found")

    def abort_all(self) -> None:
        """Nothing here runs for longer than an answer."""

    def close(self) -> None:
        """Nothing is held."""
