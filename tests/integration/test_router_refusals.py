"""Bad input of every kind gets the one error shape, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from core.errors import RequestError
from tests.raw_http import raw_client
from tests.router_server import ON_UVLOOP, configured, serving, smollm2_text
from tests.scripted_dispatcher import ScriptedDispatcher, saying

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that the router process runs on."""
    return ON_UVLOOP


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def hello() -> ScriptedDispatcher:
    return ScriptedDispatcher(saying(smollm2_text(), "Hello."))


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.headers["x-request-id"]) > 0
    body = answer.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/version", 405, "method_not_allowed"),
        ("GET", "/tokenize", 405, "method_not_allowed"),
        ("GET", "/v1/models/no/such", 404, "model_not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("GET", "/health/", 404, "not_found"),
        ("GET", "/%2Fhealth", 404, "not_found"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_routes(method: str, path: str, status: int, code: str) -> None:
    async with serving(hello()) as client:
        answer = await client.request(method, path)
    assert error_of(answer, status)["code"] == code
    assert (status == 405) == ("allow" in answer.headers)


async def test_an_unknown_route_says_where_the_known_ones_are() -> None:
    async with serving(hello()) as client:
        error = error_of(await client.get("/"), 404)
        assert error["message"] == "/: no such route; /docs shows all of them"
        assert (await client.get("/docs")).status_code == 200


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"a":"\xff"}', b"[" * 50_000])
async def test_bodies_that_are_no_json(path: str, raw: bytes) -> None:
    async with serving(hello()) as client:
        answer = await client.post(path, content=raw)
    assert error_of(answer, 400)["code"] == "invalid_json"


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
async def test_content_types(path: str) -> None:
    async with serving(hello()) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            answer = await client.post(path, content=b"{}", headers={"content-type": kind})
            assert error_of(answer, 415)["code"] == "unsupported_media_type"
        kind = "Application/JSON; charset=utf-8"
        body = b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}'
        answer = await client.post(path, content=body, headers={"content-type": kind})
        assert answer.status_code == 200


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
@pytest.mark.parametrize("chunked", [True, False])
async def test_bodies_that_are_too_large(path: str, chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 400

    config = configured(http={"max_body_bytes": 1000})
    async with serving(hello(), config) as client:
        content = parts() if chunked else b" " * 1001
        answer = await client.post(path, content=content)
        assert error_of(answer, 413)["code"] == "request_too_large"
        # The limit itself fits.
        assert error_of(await client.post(path, content=b" " * 1000), 400)["code"] == "invalid_json"


async def test_a_client_that_leaves_in_its_body() -> None:
    async with serving(hello()) as client:
        port = client.base_url.port
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        )
        await writer.drain()
        writer.close()
        for _ in range(500):
            metrics = (await client.get("/metrics")).text
            if 'route="/v1/chat/completions",status="400"' in metrics:
                return
            await asyncio.sleep(0.005)
    pytest.fail("the half request was not seen to end")


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
@pytest.mark.parametrize(
    ("rest", "code"),
    [
        (b"content-length: 100\r\n\r\n{", "incomplete_request"),
        (b"transfer-encoding: chunked\r\n\r\n5\r\n{", "incomplete_request"),
        (b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", "malformed_request"),
    ],
)
async def test_a_broken_body_is_told_to_who_still_listens(
    path: str, rest: bytes, code: str
) -> None:
    async with serving(hello()) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n".encode() + rest)
        writer.write_eof()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        assert b" 400 " in head.splitlines()[0], head
        assert b"content-type: application/json" in head
        assert json.loads(body)["error"]["code"] == code
        label = f'route="{path}",status="400"'
        assert label in (await client.get("/metrics")).text


async def test_what_is_no_http_is_counted_and_named() -> None:
    async with serving(hello()) as client, raw_client(client.base_url.port) as raw:
        raw.send(b"GET / HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n")
        answer = await raw.answer()
        assert (answer.status, answer.error()["code"]) == (400, "malformed_request")
        assert len(answer.headers["x-request-id"]) == 32
        label = 'route="other",status="400"'
        assert label in (await client.get("/metrics")).text


async def test_field_slips_reach_the_official_client() -> None:
    async with serving(hello()) as client:
        messages: Any = CHAT["messages"]
        url = f"{client.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as official:
            with pytest.raises(openai.BadRequestError) as caught:
                await official.chat.completions.create(
                    model="smol", messages=messages, temperature=3.5
                )
            assert caught.value.param == "temperature"
            assert "temperature = 3.5: must be between 0 and 2" in caught.value.message
            with pytest.raises(openai.NotFoundError) as missing:
                await official.chat.completions.create(model="gpt-4", messages=messages)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as tools:
                await official.chat.completions.create(
                    model="smol",
                    messages=messages,
                    tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
                )
            assert (tools.value.code, tools.value.param) == ("unsupported_parameter", "tools")


async def test_prompts_beyond_the_context_start_nothing() -> None:
    dispatcher = hello()
    async with serving(dispatcher) as client:
        long = {"prompt": "word " * 600}
        error = error_of(await client.post("/v1/completions", json=long), 400)
        assert error["code"] == "context_length_exceeded"
        greedy = {**CHAT, "max_tokens": 511}
        error = error_of(await client.post(PATH, json=greedy), 400)
        assert error["code"] == "context_length_exceeded"
        assert "context is 512 tokens" in error["message"]
        for empty in ("", [], [[]], ["a", ""]):
            error = error_of(await client.post("/v1/completions", json={"prompt": empty}), 400)
            assert error["code"] == "empty_prompt"
        error = error_of(await client.post(PATH, json={"messages": []}), 400)
        assert error["code"] == "empty_prompt"
    assert dispatcher.started == []


@pytest.mark.parametrize(
    ("status", "kind", "retry_after"),
    [(429, "rate_limit_error", "7"), (503, "service_unavailable", "7"), (400, None, None)],
)
async def test_the_dispatcher_s_refusals(
    status: int, kind: str | None, retry_after: str | None
) -> None:
    dispatcher = hello()
    dispatcher.refusal = RequestError("no", status=status, retry_after_s=6.2)
    async with serving(dispatcher) as client:
        for body in ({**CHAT, "stream": True}, CHAT):
            answer = await client.post(PATH, json=body)
            error = error_of(answer, status)
            assert error["type"] == (kind or "invalid_request_error")
            assert answer.headers.get("retry-after") == retry_after
        metrics = (await client.get("/metrics")).text
    assert 'finished_reason="error",model_name="smol"} 2.0' in metrics


async def test_the_second_of_two_prompts_refused_ends_the_first() -> None:
    dispatcher = hello()
    start = dispatcher.start

    def start_one(*args: Any) -> Any:
        if dispatcher.started:
            msg = "full"
            raise RequestError(msg, status=429)
        return start(*args)

    dispatcher.start = start_one  # pyright: ignore[reportAttributeAccessIssue] - a test's patch
    async with serving(dispatcher) as client:
        answer = await client.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert error_of(answer, 429)["message"] == "full"
    assert dispatcher.aborted == [dispatcher.started[0].request.request_id]


async def test_a_control_route_that_fails_shows_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher = hello()

    def broken() -> Any:
        msg = "secret detail"
        raise ValueError(msg)

    dispatcher.cluster_status = broken
    async with serving(dispatcher) as client:
        answer = await client.get("/status", headers={"x-request-id": "mine"})
    assert error_of(answer, 500)["code"] == "internal_error"
    assert "secret" not in answer.text
    record = next(one for one in caplog.records if one.name == "router.web.app")
    assert record.__dict__["request_id"] == "mine"


async def test_websockets_are_not_accepted() -> None:
    async with serving(hello()) as client:
        headers = {
            "connection": "upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        answer = await client.get("/v1/realtime", headers=headers)
    assert answer.status_code in (403, 404)
