"""Streams over real HTTP: what leaves, in which order, and when; and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from core.config import Config, HttpConfig
from core.errors import RequestError
from core.request import EngineRequest, FinishReason, TokenUpdate
from router.web.app import create_app
from router.web.asgi import WHEN_GONE, Message
from router.web.server import ApiServer
from tests.raw_http import raw_client
from tests.router_server import ON_UVLOOP, configured, events, serving, smollm2_text, until
from tests.scripted_dispatcher import ScriptedDispatcher, saying, updates_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that the router process runs on."""
    return ON_UVLOOP


TEXT = smollm2_text()
HELLO = "Hello 😀 world, it is 42."
CHAT: dict[str, Any] = {
    "model": "smol",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
}
PATH = "/v1/chat/completions"


def hello() -> ScriptedDispatcher:
    return ScriptedDispatcher(saying(TEXT, HELLO, "Good day."))


class Gated(ScriptedDispatcher):
    """Sends one token, then waits for `gate`, then ends."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        super().__init__(self._play)

    async def _play(self, request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        first, *rest = updates_of(request, [*TEXT.encode("one"), *TEXT.encode(" two"), 2])
        yield [first]
        await self.gate.wait()
        yield rest


async def test_the_shape_of_a_stream() -> None:
    async with serving(hello()) as client:
        answer = await client.post(PATH, json=CHAT)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in answer.headers
    payloads = events(answer.text)
    assert payloads[-1] == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "smol")
    }
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "stop"]
    assert "".join(choice["delta"]["content"] for choice in choices) == HELLO
    assert len(choices) == 1 + len(TEXT.encode(HELLO)) + 1, "one chunk a token, and the role's"


async def test_usage_comes_last_on_wish() -> None:
    body = {**CHAT, "stream_options": {"include_usage": True}, "n": 2}
    async with serving(hello()) as client:
        answer = await client.post(PATH, json=body, headers={"x-dovetail-trace": "1"})
    chunks = [json.loads(payload) for payload in events(answer.text)[:-1]]
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(TEXT.encode(HELLO + "Good day.")) + 2
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert last["dovetail"]["decode_worker"] == "decode-0"
    assert all(chunk["usage"] is None and "dovetail" not in chunk for chunk in others)
    for index, text in enumerate((HELLO, "Good day.")):
        mine = [c["choices"][0] for c in others if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"]["content"] for choice in mine) == text
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [*[None] * (len(reasons) - 1), "stop"]


async def test_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "stream": True, "stream_options": options, "max_tokens": 3}
    async with serving(hello()) as client:
        answer = await client.post("/v1/completions", json=body)
    chunks = [json.loads(payload) for payload in events(answer.text)[:-1]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_the_trace_is_in_the_last_chunk() -> None:
    async with serving(hello()) as client:
        answer = await client.post(PATH, json=CHAT, headers={"x-dovetail-trace": "1"})
    chunks = [json.loads(payload) for payload in events(answer.text)[:-1]]
    assert [("dovetail" in chunk) for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    assert chunks[-1]["dovetail"]["e2e_s"] is not None
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_completions_stream_with_logprobs_and_ids() -> None:
    body = {"prompt": "a", "stream": True, "logprobs": 1, "return_token_ids": True}
    async with serving(hello()) as client:
        answer = await client.post("/v1/completions", json=body)
    choices = [json.loads(payload)["choices"][0] for payload in events(answer.text)[:-1]]
    assert choices[0]["prompt_token_ids"] == TEXT.encode("a")
    assert "".join(choice["text"] for choice in choices) == HELLO
    ids = [one for choice in choices for one in choice.get("token_ids", [])]
    assert ids == [*TEXT.encode(HELLO), 2]
    offsets = [one for c in choices if c["logprobs"] for one in c["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(ids)


async def test_chat_streams_logprobs_and_ids() -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    async with serving(hello()) as client:
        answer = await client.post(PATH, json=body)
    chunks = [json.loads(payload) for payload in events(answer.text)[:-1]]
    assert chunks[0]["prompt_token_ids"][0] == 1
    entries = [e for c in chunks[1:] for e in c["choices"][0]["logprobs"]["content"]]
    assert len(entries) == len(TEXT.encode(HELLO)) + 1
    assert entries[0]["token"] == "Hello"


async def test_several_prompts_stream_together() -> None:
    async with serving(hello()) as client:
        texts = {0: "", 1: "", 2: "", 3: ""}
        async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="x") as official:
            stream = await official.completions.create(
                model="smol", prompt=["a", "b"], n=2, stream=True, max_tokens=100
            )
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: HELLO, 1: "Good day.", 2: HELLO, 3: "Good day."}


async def test_a_chunk_leaves_when_its_token_arrives() -> None:
    dispatcher = Gated()
    async with serving(dispatcher) as client, client.stream("POST", PATH, json=CHAT) as answer:
        lines = answer.aiter_lines()
        role = json.loads((await anext(lines)).removeprefix("data: "))
        assert role["choices"][0]["delta"]["role"] == "assistant"
        assert await anext(lines) == ""
        token = json.loads((await anext(lines)).removeprefix("data: "))
        assert token["choices"][0]["delta"]["content"] == "one"
        assert not dispatcher.gate.is_set()
        dispatcher.gate.set()
        assert [line async for line in lines][-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_generation(stream: bool) -> None:
    dispatcher = Gated()
    async with serving(dispatcher) as client:
        request = asyncio.create_task(client.post(PATH, json={**CHAT, "stream": stream}))
        await until(lambda: bool(dispatcher.started))
        assert dispatcher.aborted == []
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: bool(dispatcher.aborted))
        await asyncio.sleep(0)  # the abort comes just before the answer is counted
        metrics = (await client.get("/metrics")).text
    success = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="smol"}'
    assert f"{success} 1.0" in metrics
    assert 'dovetail:http_requests{state="streaming"} 0.0' in metrics
    assert f'dovetail:http_responses_total{{route="{PATH}",status="499"}} 1.0' in metrics


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
async def test_a_client_that_does_not_read_loses_its_request(prompt: object) -> None:
    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        while True:
            yield updates_of(request, TEXT.encode(HELLO) * 20)[:-1]
            await asyncio.sleep(0)

    dispatcher = ScriptedDispatcher(script)
    body = json.dumps({"prompt": prompt, "stream": True, "max_tokens": 400}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )
    async with (
        serving(dispatcher, configured(http={"send_timeout_s": 0.1})) as client,
        raw_client(client.base_url.port, receive_buffer=4096) as slow,
    ):
        cast("asyncio.ReadTransport", slow.writer.transport).pause_reading()
        slow.send(request)
        await until(lambda: 0 < len(dispatcher.started) == len(dispatcher.aborted))
        assert (await client.get("/health")).status_code == 200


async def test_silence_brings_comments() -> None:
    dispatcher = Gated()
    config = configured(http={"keepalive_comment_s": 0.02})
    async with (
        serving(dispatcher, config) as client,
        client.stream("POST", PATH, json=CHAT) as answer,
    ):
        comments = 0
        async for line in answer.aiter_lines():
            comments += line.startswith(":")
            if comments == 2:
                dispatcher.gate.set()
    assert comments >= 2


async def test_comments_may_come_before_the_first_token() -> None:
    gate = asyncio.Event()

    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        await gate.wait()
        yield updates_of(request, [5, 2])

    config = configured(http={"keepalive_comment_s": 0.02})
    async with (
        serving(ScriptedDispatcher(script), config) as client,
        client.stream("POST", PATH, json=CHAT) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith(":")
        gate.set()
        assert "data: [DONE]" in [line async for line in lines]


def failing(error: RequestError, *, after: int) -> ScriptedDispatcher:
    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        for update in updates_of(request, TEXT.encode(HELLO))[:after]:
            yield [update]
        raise error

    return ScriptedDispatcher(script)


async def test_an_error_before_the_first_token_keeps_its_status() -> None:
    error = RequestError("all full", status=429, retry_after_s=1000)
    async with serving(failing(error, after=0)) as client:
        answer = await client.post(PATH, json=CHAT)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "60"
    assert answer.json()["error"] == {
        "message": "all full",
        "type": "rate_limit_error",
        "param": None,
        "code": None,
    }


async def test_an_error_after_the_head_is_the_last_event() -> None:
    error = RequestError("decode worker lost", status=503, code="lost")
    dispatcher = failing(error, after=2)
    async with serving(dispatcher) as client:
        answer = await client.post(PATH, json=CHAT)
        metrics = (await client.get("/metrics")).text
    payloads = events(answer.text)
    assert json.loads(payloads[-1])["error"]["message"] == "decode worker lost"
    assert '"finish_reason":"' not in answer.text
    assert "[DONE]" not in answer.text
    assert len(dispatcher.aborted) == 1
    assert 'finished_reason="error",model_name="smol"} 1.0' in metrics


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.ABORT, 503)]
)
async def test_a_failed_generation_is_never_a_200(reason: FinishReason, status: int) -> None:
    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        yield updates_of(request, [5], finish=reason)

    async with serving(ScriptedDispatcher(script)) as client:
        answer = await client.post(PATH, json={**CHAT, "stream": False})
    assert answer.status_code == status
    assert "error" in answer.json()


async def test_a_broken_script_shows_no_traceback() -> None:
    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        yield updates_of(request, [5, 6])[:1]
        msg = "secret detail"
        raise ValueError(msg)

    async with serving(ScriptedDispatcher(script)) as client:
        streamed = await client.post(PATH, json=CHAT)
        whole = await client.post(PATH, json={**CHAT, "stream": False})
        several = await client.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert json.loads(events(streamed.text)[-1])["error"]["code"] == "internal_error"
    assert (whole.status_code, several.status_code) == (500, 500)
    assert "secret" not in streamed.text + whole.text + several.text


def app_of(dispatcher: ScriptedDispatcher) -> Any:
    return create_app(
        dispatcher=dispatcher,
        text=TEXT,
        config=Config(),
        clock=SystemClock(),
        registry=CollectorRegistry(),
    )


async def test_a_stop_lets_running_answers_end() -> None:
    dispatcher = Gated()
    http = HttpConfig()
    server = ApiServer(app_of(dispatcher), "127.0.0.1", 0, http=http, clock=SystemClock())
    server.start()
    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        running = asyncio.create_task(client.post(PATH, json=CHAT))
        await until(lambda: bool(dispatcher.started))
        stopping = asyncio.create_task(server.stop(drain_s=5))
        async with asyncio.timeout(5):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                except ConnectionRefusedError:
                    break
                writer.close()
                await asyncio.sleep(0.01)
        assert not stopping.done()
        dispatcher.gate.set()
        assert (await running).text.endswith("data: [DONE]\n\n")
        await stopping


async def test_a_stop_s_patience_ends() -> None:
    dispatcher = Gated()
    http = HttpConfig()
    server = ApiServer(app_of(dispatcher), "127.0.0.1", 0, http=http, clock=SystemClock())
    server.start()
    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        running = asyncio.create_task(client.post(PATH, json=CHAT))
        await until(lambda: bool(dispatcher.started))
        await server.stop(drain_s=0.05)
        answer = await running
    assert json.loads(events(answer.text)[-1])["error"]["code"] == "stopping"
    assert len(dispatcher.aborted) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_adds_nothing_to_an_answer_whose_end_waits_for_its_client(
    stream: bool,
) -> None:
    app = app_of(hello())
    sent: list[Message] = []
    ends, never = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)
        if "body" in message and not message.get("more_body") and not ends.is_set():
            ends.set()
            await never.wait()

    async def receive() -> Message:
        if received:
            await never.wait()
        received.append(True)
        return {"type": "http.request", "body": json.dumps({**CHAT, "stream": stream}).encode()}

    received: list[bool] = []

    def when_gone(call: Callable[[], None] | None) -> None:
        """The client stays."""

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], WHEN_GONE: when_gone}
    answering = asyncio.create_task(app(scope, receive, send))
    async with asyncio.timeout(60):
        await ends.wait()
        num_sent = len(sent)
        app.abort_all()
        await asyncio.wait({answering})
    assert answering.cancelled()
    assert len(sent) == num_sent
    app.close()
