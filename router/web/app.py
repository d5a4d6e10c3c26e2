"""The router's ASGI application.

CORS (if any) -> gate: request id, authentication, errors -> token path (plain ASGI)
                                                          -> FastAPI (control routes)
"""

from __future__ import annotations

import hmac
import logging
from importlib.metadata import version

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from core.clock import Clock
from core.config import Config
from core.errors import RequestError
from router.dispatch.interface import Dispatcher
from router.text.text_model import TextModel
from router.web.asgi import AsgiApp, ClientGone, Message, Receive, Scope, Send, header, send_bytes
from router.web.completions import READERS, CompletionsEndpoint
from router.web.context import ApiContext
from router.web.control_routes import add_control_routes
from router.web.errors import (
    error_body,
    error_headers,
    internal_error,
    method_not_allowed,
    not_found,
)
from router.web.metrics import RouterMetrics
from router.web.request_ids import accept_or_make

_log = logging.getLogger(__name__)

_OPEN_ROUTES = ("/health", "/health/live", "/health/ready", "/version", "/metrics", "/status")
"""Probes, scrapers and operators need no key; they see no prompt and start no work."""

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
    control = FastAPI(title="Dovetail", version=version("dovetail"), redirect_slashes=False)
    control.add_exception_handler(RequestError, _on_request_error)
    control.add_exception_handler(HTTPException, _on_http_exception)
    control.add_exception_handler(Exception, _on_exception)
    add_control_routes(control, context, registry, started=int(clock.wall()))
    return RouterApp(context, control)


async def _on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return _response(not_found(path))
    if error.status_code == 405:
        response = _response(method_not_allowed(request.method, path))
        response.headers.update(error.headers or {})
        return response
    return _response(RequestError(str(error.detail), status=error.status_code))


async def _on_exception(_: Request, error: Exception) -> Response:
    """Starlette raises it again after this answer; the gate logs or counts it."""
    del error
    return _response(internal_error())


def _response(error: RequestError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), status_code=error.status, headers=headers)


class RouterApp:
    """The application; `abort_all` ends what is running, `close` lets its threads go."""

    def __init__(self, context: ApiContext, control: FastAPI) -> None:
        self._context = context
        self._completions = {
            path: CompletionsEndpoint(context, read) for path, read in READERS.items()
        }
        self._control: AsgiApp = control
        self._routes = {*_OPEN_ROUTES, "/v1/models", "/tokenize", "/detokenize", *READERS}
        self._keys = [key.encode() for key in context.config.api.keys]
        self._entry: AsgiApp = self._gate
        origins = context.config.http.allow_origins
        if origins:
            self._entry = CORSMiddleware(
                self._gate,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-dovetail-ignored"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve HTTP; other scopes (WebSocket) are closed by not being accepted."""
        if scope["type"] == "http":
            await self._entry(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    def abort_all(self) -> None:
        """End all generations with 503, or an error event."""
        for endpoint in self._completions.values():
            endpoint.abort_all()

    def close(self) -> None:
        """Release threads."""
        self._context.close()

    async def _gate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the request, check its key, and answer what nobody else answers."""
        request_id = accept_or_make(header(scope, b"x-request-id"))
        scope["dovetail.request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            self._authenticate(scope)
            await self._route(scope, receive, send_named)
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
            path = scope["path"]
            route = path if path in self._routes else "other"
            self._context.metrics.answered(route, status)

    def _authenticate(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in _OPEN_ROUTES:
            return
        kind, _, key = (header(scope, b"authorization") or "").partition(" ")
        given = key.strip().encode("latin-1")
        # Compare with all keys, so that the time says nothing about which one was near.
        matches = [hmac.compare_digest(given, accepted) for accepted in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            msg = "authorization: must be 'Bearer' and a valid API key"
            raise RequestError(msg, status=401, code="invalid_api_key")

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._completions.get(scope["path"])
        if endpoint is None:
            await self._control(scope, receive, send)
        elif scope["method"] == "POST":
            await endpoint(scope, receive, send)
        else:
            error = method_not_allowed(scope["method"], scope["path"])
            headers = [*error_headers(error), (b"allow", b"POST")]
            await send_bytes(send, error.status, error_body(error), headers)
