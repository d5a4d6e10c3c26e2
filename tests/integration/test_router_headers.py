"""What a request's headers and unknown fields do over real HTTP: ids, debugging, keys, origins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from core.ids import client_id_of
from core.request import EngineRequest, TokenUpdate
from router.dispatch.interface import Disaggregate
from tests.router_server import ON_UVLOOP, configured, serving, smollm2_text, until
from tests.scripted_dispatcher import ScriptedDispatcher, saying, updates_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that the router process runs on."""
    return ON_UVLOOP


TEXT = smollm2_text()
CHAT: dict[str, Any] = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}


def hello() -> ScriptedDispatcher:
    return ScriptedDispatcher(saying(TEXT, "Hello 😀 world, it is 42.", "Good day."))


async def test_request_ids() -> None:
    dispatcher = hello()
    async with serving(dispatcher) as client:
        given = await client.post(
            "/v1/chat/completions", json=CHAT, headers={"x-request-id": "my-id.1"}
        )
        assert given.headers["x-request-id"] == "my-id.1"
        assert given.json()["id"] == "chatcmpl-my-id.1"
        name = dispatcher.started[0].request.request_id
        assert client_id_of(name) == "my-id.1" != name
        for bad in (b"a b", b"x" * 129, "ü".encode()):
            made = await client.get("/version", headers=[(b"x-request-id", bad)])
            assert len(made.headers["x-request-id"]) == 32


async def test_requests_of_one_id_get_names_of_their_own_at_once_and_afterwards() -> None:
    gate = asyncio.Event()

    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        await gate.wait()
        yield updates_of(request, [5, 2])

    dispatcher = ScriptedDispatcher(script)
    async with serving(dispatcher) as client:

        async def post() -> httpx.Response:
            headers = {"x-request-id": "x" * 128}
            return await client.post("/v1/chat/completions", json=CHAT, headers=headers)

        posts = [asyncio.create_task(post()) for _ in range(3)]
        await until(lambda: len(dispatcher.started) == 3)
        gate.set()
        answers = [*await asyncio.gather(*posts), await post()]
    assert {answer.status_code for answer in answers} == {200}
    ids = {one.request.request_id for one in dispatcher.started}
    assert len(ids) == 4
    assert {client_id_of(one) for one in ids} == {"x" * 128}


async def test_debug_headers_work_on_loopback_only() -> None:
    headers = {"x-dovetail-trace": "1", "x-dovetail-disaggregate": "never"}
    dispatcher = hello()
    async with serving(dispatcher) as client:
        answer = (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).json()
        assert dispatcher.started[0].disaggregate is Disaggregate.NEVER
        trace = answer["dovetail"]
        assert (trace["prefill_worker"], trace["decode_worker"]) == ("prefill-0", "decode-0")
        assert trace["blocks_transferred"] == 2
        assert trace["bytes_transferred"] == 737280
        assert 0 <= trace["ttft_s"] <= trace["e2e_s"]
        two = {"prompt": ["a", "b"]}
        answer = (await client.post("/v1/completions", json=two, headers=headers)).json()
        assert len(answer["dovetail"]["requests"]) == 2
        headers["x-dovetail-disaggregate"] = "maybe"
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert refused.json()["error"]["param"] == "x-dovetail-disaggregate"
    headers["x-dovetail-disaggregate"] = "never"
    async with serving(hello(), configured(http={"host": "127.0.0.2"})) as client:
        answer = (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).json()
    assert "dovetail" in answer
    config = configured(http={"host": "0.0.0.0"})
    dispatcher = hello()
    async with serving(dispatcher, config) as client:
        answer = (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).json()
    assert "dovetail" not in answer
    assert dispatcher.started[0].disaggregate is Disaggregate.AUTO


async def test_unknown_fields_are_ignored_visibly_or_refused() -> None:
    body = {**CHAT, "wobble": 1, "wéird\n": 2}
    async with serving(hello()) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-dovetail-ignored"] == "wobble, w\\xe9ird?"
        metrics = (await client.get("/metrics")).text
        assert "dovetail:ignored_fields_total 2.0" in metrics
    async with serving(hello(), configured(api={"unknown_fields": "reject"})) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unknown_parameter"
    assert answer.json()["error"]["param"] == "wobble"


async def test_authentication() -> None:
    async with serving(hello(), configured(api={"keys": ("secret", "other")})) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 401
        for path in ("/health", "/health/ready", "/metrics", "/version", "/status"):
            assert (await client.get(path)).status_code == 200
        headers = {"authorization": "Bearer other"}
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 200


async def test_cors_is_off_unless_origins_are_allowed() -> None:
    preflight = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
    }
    async with serving(hello()) as client:
        answer = await client.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 405
        assert "access-control-allow-origin" not in answer.headers
    config = configured(http={"allow_origins": ("https://a.example",)})
    async with serving(hello(), config) as client:
        answer = await client.options("/v1/chat/completions", headers=preflight)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-methods"] == "GET, HEAD, POST"
        assert answer.headers["access-control-allow-headers"] == "content-type,authorization"
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        answer = await client.post(
            "/v1/chat/completions", json=CHAT, headers={"origin": "https://a.example"}
        )
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        preflight["origin"] = "https://b.example"
        answer = await client.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in answer.headers
        answer = await client.get("/version", headers={"origin": "https://b.example"})
        assert (answer.status_code, answer.headers["vary"]) == (200, "origin")
        assert "access-control-allow-origin" not in answer.headers
