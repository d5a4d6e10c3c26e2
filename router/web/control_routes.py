"""Everything but the token path, by FastAPI: models, tokenizer, health, status, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from core.errors import RequestError
from router.api.fields import FieldReader, parse_body
from router.api.messages import read_messages
from router.dispatch.interface import ServedModel
from router.web.asgi import check_json_content, read_body
from router.web.context import ApiContext
from router.web.prepare import check_model


def add_control_routes(
    app: FastAPI, context: ApiContext, registry: CollectorRegistry, *, started: int
) -> None:
    """Add the routes; `started`: seconds since the epoch, the models' `created`."""
    _add_health(app, context)
    _add_models(app, context, started)
    _add_tokenizer(app, context)

    @app.head("/version", include_in_schema=False)
    @app.get("/version", tags=["about"])
    async def show_version() -> dict[str, str]:
        """Return this router's version."""
        return {"version": version("dovetail")}

    @app.get("/status", tags=["about"])
    async def status() -> Response:
        """Return workers, roles, blocks by state, queues, requests by state."""
        return _json(context.dispatcher.cluster_status())

    @app.get("/metrics", tags=["about"])
    async def metrics() -> Response:
        """Return the router's series for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _add_health(app: FastAPI, context: ApiContext) -> None:
    # Load balancers probe with HEAD; the server leaves its answers' bodies out.
    @app.head("/health", include_in_schema=False)
    @app.head("/health/live", include_in_schema=False)
    @app.get("/health", tags=["health"])
    @app.get("/health/live", tags=["health"])
    async def live() -> dict[str, str]:
        """Answer as long as the process serves HTTP."""
        return {"status": "alive"}

    @app.head("/health/ready", include_in_schema=False)
    @app.get("/health/ready", tags=["health"])
    async def ready() -> Response:
        """Answer 200 when a request could be served now, else 503."""
        if context.dispatcher.is_ready():
            return _json({"status": "ready"})
        return JSONResponse({"status": "not ready"}, status_code=503, headers={"retry-after": "1"})


def _add_models(app: FastAPI, context: ApiContext, started: int) -> None:
    @app.get("/v1/models", tags=["models"])
    async def models() -> Response:
        """List the served model, with `max_model_len`."""
        return _json({"object": "list", "data": [_model_card(context.model(), started)]})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str) -> Response:
        """Return one model."""
        served = context.model()
        check_model(name, served)
        return _json(_model_card(served, started))


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


def _add_tokenizer(app: FastAPI, context: ApiContext) -> None:
    @app.post("/tokenize", tags=["tokenizer"])
    async def tokenize(request: Request) -> Response:
        """Return the token ids of `prompt`, or of `messages` under the chat template (vLLM's)."""
        reader = FieldReader(await _body(context, request))
        model = context.model()
        check_model(reader.text("model"), model)
        text, adds_special = _text_to_tokenize(context, reader)
        special = reader.boolean("add_special_tokens", default=adds_special)
        encode = context.text.encode
        ids = await context.off_loop(len(text), encode, text, add_special_tokens=special)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": model.max_model_len,
            "tokens": ids,
        }
        if reader.boolean("return_token_strs", default=False):
            answer["token_strs"] = [context.text.token_string(one) for one in ids]
        return _json(answer)

    @app.post("/detokenize", tags=["tokenizer"])
    async def detokenize(request: Request) -> Response:
        """Return the text of `tokens`, special tokens included (vLLM's)."""
        reader = FieldReader(await _body(context, request))
        check_model(reader.text("model"), context.model())
        tokens = reader.token_ids("tokens", context.text.vocab_size)
        if tokens is None:
            msg = "tokens: is required"
            raise RequestError(msg, param="tokens", code="missing_required_parameter")
        decode = context.text.decode
        text = await context.off_loop(len(tokens), decode, tokens, skip_special_tokens=False)
        return _json({"prompt": text})


def _text_to_tokenize(context: ApiContext, reader: FieldReader) -> tuple[str, bool]:
    """Return the text, and whether special tokens are added to such a text by default."""
    messages = reader.raw("messages")
    if messages is not None:
        variables = reader.mapping("chat_template_kwargs")
        prompted = reader.boolean("add_generation_prompt", default=True)
        read = read_messages(messages)
        rendered = context.text.render_chat(
            read.messages, add_generation_prompt=prompted, variables=variables
        )
        return rendered, False
    prompt = reader.text("prompt")
    if prompt is None:
        msg = "prompt: is required (or messages)"
        raise RequestError(msg, param="prompt", code="missing_required_parameter")
    return prompt, True


async def _body(context: ApiContext, request: Request) -> Mapping[str, Any]:
    check_json_content(request.scope)
    raw = await read_body(request.scope, request.receive, context.config.http.max_body_bytes)
    return parse_body(raw)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
