"""The router's ASGI application.

CORS (if any) -> gate: request id, authentication, errors -> routes
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from importlib.metadata import version

from prometheus_client import CollectorRegistry

from core.clock import Clock
from core.config import Config
from core.errors import RequestError
from router.dispatch.interface import Dispatcher
from router.text.text_model import TextModel
from router.web.asgi import (
    AsgiApp,
    ClientGone,
    Message,
    Receive,
    Scope,
    Send,
    header,
    refuse_what_is_no_request,
    send_bytes,
)
from router.web.bearer_keys import BearerKeys
from router.web.completions import READERS, CompletionsEndpoint
from router.web.context import ApiContext
from router.web.control_routes import ControlRoutes
from router.web.cors import Cors
from router.web.errors import error_body, error_headers, internal_error
from router.web.metrics import RouterMetrics
from router.web.openapi.routes import COMPLETION_OPERATIONS, DocumentRoutes
from router.web.order_routes import OrderRoutes
from router.web.request_ids import accept_or_make
from router.web.routing import Route, Router

_log = logging.getLogger(__name__)

_OPEN_ROUTES = (
    *("/health", "/health/live", "/health/ready"),
    *("/version", "/metrics", "/status", "/docs", "/openapi.json"),
)
"""Probes, scrapers, operators and readers need no key; they see no prompt and start no work."""

_CLIENT_GONE = 499
"""nginx's status for a client that left, in our metrics only."""


def create_app(
    *,
    dispatcher: Dispatcher,
    text: TextModel,
    config: Config,
    clock: Clock,
    registry: CollectorRegistry,
) -> RouterApp:
    """Wire the HTTP side; its metrics register with `registry`, which `/metrics` shows whole."""
    metrics = RouterMetrics(registry, config.model.max_model_len or text.max_model_len)
    context = ApiContext(dispatcher, text, config, clock, metrics)
    completions = {path: CompletionsEndpoint(context, read) for path, read in READERS.items()}
    routes = [
        Route("POST", path, endpoint, COMPLETION_OPERATIONS[path])
        for path, endpoint in completions.items()
    ]
    routes += ControlRoutes(context, registry, started=int(clock.wall())).routes()
    routes += OrderRoutes(context).routes()
    routes += DocumentRoutes(tuple(routes), version=version("dovetail")).routes()
    return RouterApp(context, Router(routes), list(completions.values()))


class RouterApp:
    """The application; `abort_all` ends what is running, `close` lets its threads go."""

    def __init__(
        self, context: ApiContext, router: Router, completions: list[CompletionsEndpoint]
    ) -> None:
        self._context = context
        self._router = router
        self._completions = completions
        api = context.config.api
        # Operators may ask, too; their keys alone do not close the API to others.
        self._keys = BearerKeys((*api.keys, *api.operator_keys) if api.keys else ())
        origins = context.config.http.allow_origins
        self._entry: AsgiApp = Cors(self._gate, origins) if origins else self._gate

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request."""
        return self._entry(scope, receive, send)

    def abort_all(self) -> None:
        """End all generations with 503, or an error event."""
        for endpoint in self._completions:
            endpoint.abort_all()

    def close(self) -> None:
        """Release threads."""
        self._context.close()

    async def _gate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the request, check its key, and answer what nobody else answers."""
        request_id = accept_or_make(header(scope, b"x-request-id"), self._context.entropy)
        scope["dovetail.request_id"] = request_id
        status = 0

        def send_named(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                ]
            return send(message)

        try:
            refuse_what_is_no_request(scope)
            self._authenticate(scope)
            await self._router(scope, receive, send_named)
        except RequestError as error:
            await send_bytes(send_named, error.status, error_body(error), error_headers(error))
        except ClientGone:
            status = _CLIENT_GONE
        except Exception:  # noqa: BLE001 - the border: a 500 for the client, the trace for the log
            _log.exception("a handler failed", extra={"request_id": request_id})
            if status == 0:
                error = internal_error()
                await send_bytes(send_named, error.status, error_body(error), error_headers(error))
        finally:
            self._context.metrics.answered(self._router.label(scope["path"]), status)

    def _authenticate(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in _OPEN_ROUTES:
            return
        if not self._keys.has(scope):
            msg = "authorization: must be 'Bearer' and a valid API key"
            raise RequestError(msg, status=401, code="invalid_api_key")
