"""/openapi.json and /docs; and what the document says of the two completion routes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.web.asgi import Receive, Scope, Send, send_bytes
from router.web.openapi.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
)
from router.web.openapi.document import document
from router.web.openapi.page import DOCS_PAGE
from router.web.openapi.requests import ChatCompletionRequest, CompletionRequest
from router.web.routing import Answer, Operation, Route

_EVENTS = "text/event-stream"

COMPLETION_OPERATIONS = {
    "/v1/chat/completions": Operation(
        "Answer a chat.",
        "generation",
        {
            200: (
                Answer("The answer.", ChatCompletion),
                Answer(
                    "Or, with `stream`, its chunks, then `[DONE]`.", ChatCompletionChunk, _EVENTS
                ),
            )
        },
        body=ChatCompletionRequest,
    ),
    "/v1/completions": Operation(
        "Go on with a text.",
        "generation",
        {
            200: (
                Answer("The answer.", Completion),
                Answer("Or, with `stream`, its chunks, then `[DONE]`.", CompletionChunk, _EVENTS),
            )
        },
        body=CompletionRequest,
    ),
}


class DocumentRoutes:
    """Serves the document of `routes`, made when it is first asked for."""

    def __init__(self, routes: Sequence[Route], *, version: str) -> None:
        self._routes = routes
        self._version = version
        self._document: bytes | None = None

    def routes(self) -> list[Route]:
        """Return the two routes, which the document leaves out."""
        return [
            Route("GET", "/openapi.json", self._send_document, _OF_DOCUMENT),
            Route("GET", "/docs", self._send_page, _OF_DOCUMENT),
        ]

    async def _send_document(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        if self._document is None:
            made = document(self._routes, version=self._version)
            self._document = msgspec.json.encode(made)
        await send_bytes(send, 200, self._document)

    async def _send_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        headers = [(b"content-type", b"text/html; charset=utf-8")]
        await send_bytes(send, 200, DOCS_PAGE.encode(), headers)


_OF_DOCUMENT = Operation("This API, described.", "about", {}, needs_key=False)
