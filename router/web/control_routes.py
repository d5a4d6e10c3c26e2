"""Everything but the token path: models, tokenizer, health, status, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from core.errors import RequestError
from router.api.fields import FieldReader, parse_body
from router.api.messages import read_messages
from router.dispatch.interface import ServedModel
from router.web.asgi import (
    JSON,
    Headers,
    Receive,
    Scope,
    Send,
    check_json_content,
    read_body,
    send_bytes,
)
from router.web.context import ApiContext
from router.web.openapi.answers import Health, Model, ModelList, Status, Text, Tokens, Version
from router.web.openapi.requests import DetokenizeRequest, TokenizeRequest
from router.web.prepare import check_model
from router.web.routing import Answer, Operation, Route


class ControlRoutes:
    """The endpoints.

    Args:
        started: seconds since the epoch, the models' `created`.
    """

    def __init__(self, context: ApiContext, registry: CollectorRegistry, *, started: int) -> None:
        self._context = context
        self._registry = registry
        self._started = started

    def routes(self) -> list[Route]:
        """Return them."""
        return [
            Route("GET", "/v1/models", self._models, _MODELS),
            Route("GET", "/v1/models/{name}", self._model, _MODEL),
            Route("POST", "/tokenize", self._tokenize, _TOKENIZE),
            Route("POST", "/detokenize", self._detokenize, _DETOKENIZE),
            Route("GET", "/health", self._live, _LIVE),
            Route("GET", "/health/live", self._live, _LIVE),
            Route("GET", "/health/ready", self._ready, _READY),
            Route("GET", "/version", self._version, _VERSION),
            Route("GET", "/status", self._status, _STATUS),
            Route("GET", "/metrics", self._metrics, _METRICS),
        ]

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await _send_json(send, {"status": "alive"})

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        if self._context.dispatcher.is_ready():
            await _send_json(send, {"status": "ready"})
        else:
            headers = [JSON, (b"retry-after", b"1")]
            await _send_json(send, {"status": "not ready"}, status=503, headers=headers)

    async def _version(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await _send_json(send, {"version": version("dovetail")})

    async def _status(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await _send_json(send, self._context.dispatcher.cluster_status())

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
        await send_bytes(send, 200, generate_latest(self._registry), headers)

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        card = _model_card(self._context.model(), self._started)
        await _send_json(send, {"object": "list", "data": [card]})

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        served = self._context.model()
        check_model(scope["path_params"]["name"], served)
        await _send_json(send, _model_card(served, self._started))

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        reader = FieldReader(await self._body(scope, receive))
        model = context.model()
        check_model(reader.text("model"), model)
        text, adds_special = self._text_to_tokenize(reader)
        special = reader.boolean("add_special_tokens", default=adds_special)
        with_texts = reader.boolean("return_token_strs", default=False)
        encode = context.text.encode
        ids = await context.off_loop(len(text), encode, text, add_special_tokens=special)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": model.max_model_len,
            "tokens": ids,
        }
        if with_texts:
            answer["token_strs"] = [context.text.token_string(one) for one in ids]
        await _send_json(send, answer)

    def _text_to_tokenize(self, reader: FieldReader) -> tuple[str, bool]:
        """Return the text, and whether special tokens are added to such a text by default."""
        messages = reader.raw("messages")
        if messages is not None:
            variables = reader.mapping("chat_template_kwargs")
            prompted = reader.boolean("add_generation_prompt", default=True)
            read = read_messages(messages)
            rendered = self._context.text.render_chat(
                read.messages, add_generation_prompt=prompted, variables=variables
            )
            return rendered, False
        prompt = reader.text("prompt")
        if prompt is None:
            msg = "prompt: is required (or messages)"
            raise RequestError(msg, param="prompt", code="missing_required_parameter")
        return prompt, True

    async def _detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        reader = FieldReader(await self._body(scope, receive))
        check_model(reader.text("model"), context.model())
        tokens = reader.token_ids("tokens", context.text.vocab_size)
        if tokens is None:
            msg = "tokens: is required"
            raise RequestError(msg, param="tokens", code="missing_required_parameter")
        decode = context.text.decode
        text = await context.off_loop(len(tokens), decode, tokens, skip_special_tokens=False)
        await _send_json(send, {"prompt": text})

    async def _body(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        check_json_content(scope)
        return parse_body(await read_body(scope, receive, self._context.config.http.max_body_bytes))


def _model_card(model: ServedModel, started: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": started,
        "owned_by": "dovetail",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


async def _send_json(
    send: Send, value: object, *, status: int = 200, headers: Headers = (JSON,)
) -> None:
    await send_bytes(send, status, msgspec.json.encode(value), headers)


def _said(body: type, text: str = "As asked.") -> dict[int, tuple[Answer, ...]]:
    return {200: (Answer(text, body),)}


_MODELS = Operation("The served model.", "models", _said(ModelList))
_MODEL = Operation("One model.", "models", _said(Model))
_TOKENIZE = Operation(
    "Token ids of a text, or of messages under the chat template (vLLM's).",
    "tokenizer",
    _said(Tokens),
    body=TokenizeRequest,
)
_DETOKENIZE = Operation(
    "The text of token ids, special tokens included (vLLM's).",
    "tokenizer",
    _said(Text),
    body=DetokenizeRequest,
)
_LIVE = Operation("Whether the process serves HTTP.", "health", _said(Health), needs_key=False)
_READY = Operation(
    "Whether a request could be served now.",
    "health",
    {**_said(Health, "It could."), 503: (Answer("It could not.", Health),)},
    needs_key=False,
)
_VERSION = Operation("This router's version.", "about", _said(Version), needs_key=False)
_STATUS = Operation(
    "Workers, roles, blocks by state, queues, requests by state.",
    "about",
    _said(Status),
    needs_key=False,
)
_METRICS = Operation(
    "The router's series for Prometheus.",
    "about",
    {200: (Answer("Prometheus's text format.", content_type="text/plain"),)},
    needs_key=False,
)
