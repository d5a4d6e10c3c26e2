"""Routes: which endpoint answers a method on a path, and what the API's document says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable

import msgspec

from router.web.asgi import AsgiApp, Receive, Scope, Send, send_bytes
from router.web.errors import error_body, error_headers, method_not_allowed, not_found


class Answer(msgspec.Struct, frozen=True):
    """One of an operation's answers, for the document.

    Attributes:
        body: type of its JSON body; None where `content_type` is not JSON.
    """

    text: str
    body: type | None = None
    content_type: str = "application/json"


class Operation(msgspec.Struct, frozen=True):
    """What the document says of a route.

    Attributes:
        body: type of the request's JSON body; None where there is none.
        answers: by status; the errors that every route may have go without saying.
    """

    summary: str
    tag: str
    answers: dict[int, tuple[Answer, ...]]
    body: type | None = None
    needs_key: bool = True


class Route(msgspec.Struct, frozen=True):
    """One method on one path.

    Attributes:
        path: may end in a `{name}`, which stands for the rest, slashes included; the endpoint finds
            it in `scope["path_params"]`.
    """

    method: str
    path: str
    endpoint: AsgiApp
    operation: Operation


class Router:
    """An ASGI application of routes. HEAD is answered as GET, without the body."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, AsgiApp]] = {}
        self._prefixes: dict[str, tuple[str, dict[str, AsgiApp]]] = {}
        for route in routes:
            methods = self._methods(route.path)
            methods[route.method] = route.endpoint
            if route.method == "GET":
                methods["HEAD"] = route.endpoint

    def _methods(self, path: str) -> dict[str, AsgiApp]:
        prefix, brace, name = path.partition("{")
        if not brace:
            return self._exact.setdefault(path, {})
        return self._prefixes.setdefault(prefix, (name.rstrip("}"), {}))[1]

    def label(self, path: str) -> str:
        """Return the route's own path, for metrics; "other" where there is none."""
        if path in self._exact:
            return path
        found = self._find_prefix(path)
        return "other" if found is None else found + "{" + self._prefixes[found][0] + "}"

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request, with 405 where no route of this path does.

        Raises:
            RequestError: 404 where there is none of this path.
        """
        path, method = scope["path"], scope["method"]
        methods = self._exact.get(path)
        if methods is None:
            prefix = self._find_prefix(path)
            if prefix is None:
                raise not_found(path)
            name, methods = self._prefixes[prefix]
            scope["path_params"] = {name: path.removeprefix(prefix)}
        endpoint = methods.get(method)
        if endpoint is not None:
            return endpoint(scope, receive, send)
        error = method_not_allowed(method, path)
        headers = [*error_headers(error), (b"allow", ", ".join(sorted(methods)).encode())]
        return send_bytes(send, error.status, error_body(error), headers)

    def _find_prefix(self, path: str) -> str | None:
        for prefix in self._prefixes:
            if path.startswith(prefix) and len(path) > len(prefix):
                return prefix
        return None
