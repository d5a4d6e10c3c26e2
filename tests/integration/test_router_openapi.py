"""The API's document: complete, true to what is read and written, shown without the internet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from router.api.generation_params import Vocabulary
from router.api.requests import read_chat, read_completion
from router.web.openapi import answers, requests
from tests.router_server import ON_UVLOOP, events, serving, smollm2_text
from tests.scripted_dispatcher import ScriptedDispatcher, saying

pytestmark = pytest.mark.anyio

TEXT = smollm2_text()
VOCABULARY = Vocabulary(TEXT.vocab_size, TEXT.eos_token_ids)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXTS: dict[str, Any] = {"prompt": ["a", "b"]}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that the router process runs on."""
    return ON_UVLOOP


def hello() -> ScriptedDispatcher:
    return ScriptedDispatcher(saying(TEXT, "Hello, it is 42.", "Good day."))


async def test_the_document_has_every_route_and_needs_no_key() -> None:
    async with serving(hello()) as client:
        document = (await client.get("/openapi.json")).json()
        page = await client.get("/docs")
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]) == {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}"),
        *("/tokenize", "/detokenize", "/health", "/health/live", "/health/ready"),
        *("/version", "/status", "/metrics", "/drain", "/role"),
    }
    operation = document["paths"]["/v1/chat/completions"]["post"]
    assert set(operation["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }
    error = operation["responses"]["default"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/ErrorAnswer"}
    fields = document["components"]["schemas"]["ChatCompletionRequest"]
    assert fields["required"] == ["messages"]
    assert fields["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "openapi.json" in page.text
    assert "://" not in page.text, "nothing comes from elsewhere"


class Watched(dict[str, Any]):
    """A body that notes which of its fields are read."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(body)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


@pytest.mark.parametrize(
    ("read", "body", "documented"),
    [
        (read_chat, CHAT, requests.ChatCompletionRequest),
        (read_completion, TEXTS, requests.CompletionRequest),
    ],
)
def test_reader_and_document_know_the_same_fields(
    read: Callable[..., Any], body: dict[str, Any], documented: type[msgspec.Struct]
) -> None:
    names = set(documented.__struct_fields__)
    given = dict.fromkeys(names) | body
    assert read(given, VOCABULARY).params.ignored == (), "all that is documented is known"
    watched = Watched(body)
    read(watched, VOCABULARY)
    # What is read but not documented must be what is refused unless it changes nothing.
    for name in sorted(watched.read - names):
        with pytest.raises(Exception, match=f"{name} = .*not supported"):
            read({**body, name: {"x": 1}}, VOCABULARY)


@pytest.mark.parametrize(
    ("path", "body", "whole", "chunk"),
    [
        ("/v1/chat/completions", CHAT, answers.ChatCompletion, answers.ChatCompletionChunk),
        ("/v1/completions", TEXTS, answers.Completion, answers.CompletionChunk),
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2, "return_token_ids": True},
        {"logprobs": 2, "echo": True},
        {"stream_options": {"include_usage": True}},
    ],
)
async def test_answers_are_as_documented(
    path: str, body: dict[str, Any], whole: type, chunk: type, more: dict[str, Any]
) -> None:
    if "logprobs" in more and body is CHAT:
        more = {"logprobs": True, "top_logprobs": 2}
    headers = {"x-dovetail-trace": "1"}
    async with serving(hello()) as client:
        if "stream_options" not in more:
            answer = await client.post(path, json={**body, **more}, headers=headers)
            expect_shape(answer.content, whole)
        streamed = await client.post(path, json={**body, **more, "stream": True}, headers=headers)
    *payloads, done = events(streamed.text)
    assert done == "[DONE]"
    assert payloads
    for payload in payloads:
        expect_shape(payload.encode(), chunk)


def expect_shape(raw: bytes, documented: type) -> None:
    """The documented type reads it, and knows all its names."""
    value = msgspec.json.decode(raw, type=documented)
    assert not missing(json.loads(raw), msgspec.to_builtins(value)), raw


def missing(written: Any, documented: Any) -> list[str]:
    """Return names that were written and not documented."""
    if isinstance(written, dict) and isinstance(documented, dict):
        names = [name for name in written if name not in documented]
        inner = [missing(written[name], documented[name]) for name in written if not names]
        return names + [one for some in inner for one in some]
    if isinstance(written, list):
        return [one for pair in zip(written, documented, strict=True) for one in missing(*pair)]
    return []


async def test_the_other_answers_are_as_documented() -> None:
    async with serving(hello()) as client:
        for path, documented in (
            ("/v1/models", answers.ModelList),
            ("/v1/models/smol", answers.Model),
            ("/health/ready", answers.Health),
            ("/version", answers.Version),
            ("/status", answers.Status),
            ("/v1/models/other", answers.ErrorAnswer),
        ):
            expect_shape((await client.get(path)).content, documented)
        tokens = await client.post("/tokenize", json={"prompt": "x", "return_token_strs": True})
        expect_shape(tokens.content, answers.Tokens)
        text = await client.post("/detokenize", json={"tokens": [5]})
        expect_shape(text.content, answers.Text)
