"""Whole answers over real HTTP: the official clients, choices, logprobs, routes around them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from core.errors import UsageError
from core.request import EngineRequest, TokenLogprobs, TokenUpdate
from router.web.server import listen
from tests.router_server import ON_UVLOOP, configured, serving, smollm2_text
from tests.scripted_dispatcher import ScriptedDispatcher, playing, saying, updates_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the loop that the router process runs on."""
    return ON_UVLOOP


TEXT = smollm2_text()
HELLO = "Hello 😀 world, it is 42."
CHAT: dict[str, Any] = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}


def hello() -> ScriptedDispatcher:
    return ScriptedDispatcher(saying(TEXT, HELLO, "Good day."))


def openai_client(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="any", max_retries=0)


async def test_chat_by_the_official_client() -> None:
    dispatcher = hello()
    async with serving(dispatcher) as client, openai_client(client) as official:
        answer = await official.chat.completions.create(
            model="smol",
            messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
            n=2,
            seed=7,
            logprobs=True,
            top_logprobs=2,
        )
    assert [choice.message.content for choice in answer.choices] == [HELLO, "Good day."]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.object == "chat.completion"
    assert answer.model == "smol"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    raw = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert raw.decode() == HELLO + "<|im_end|>"
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, -9999.0]
    request = dispatcher.started[0].request
    prompt = TEXT.render_chat(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    )
    assert list(request.prompt) == TEXT.encode(prompt, add_special_tokens=False)
    assert request.sampling.seed == 7
    assert request.sampling.max_tokens == 512 - len(request.prompt)
    usage = answer.usage
    assert usage is not None
    num_tokens = sum(len(TEXT.encode(text)) + 1 for text in (HELLO, "Good day."))
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(request.prompt), num_tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3


async def test_the_synchronous_client() -> None:
    async with serving(hello()) as client:
        url = f"{client.base_url}/v1"

        def talk() -> tuple[str | None, str, list[str]]:
            with openai.OpenAI(base_url=url, api_key="any") as sync:
                whole = sync.chat.completions.create(**CHAT)
                events = sync.chat.completions.create(**CHAT, stream=True)
                pieces = [event.choices[0].delta.content or "" for event in events]
                models = [model.id for model in sync.models.list()]
                return whole.choices[0].message.content, "".join(pieces), models

        assert await asyncio.to_thread(talk) == (HELLO, HELLO, ["smol"])


async def test_completions_of_several_prompts() -> None:
    dispatcher = hello()
    async with serving(dispatcher) as client, openai_client(client) as official:
        answer = await official.completions.create(
            model="smol", prompt=["a b", "c"], n=2, logprobs=1, max_tokens=3
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["Hello 😀", "Good day."] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 4
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Good", " day", "."]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 4, 8]
    assert logprobs.top_logprobs == [{"Good": -0.5}, {" day": -0.5}, {".": -0.5}]
    ids = [one.request.request_id for one in dispatcher.started]
    assert len(set(ids)) == 2
    assert [list(one.request.prompt) for one in dispatcher.started] == [
        TEXT.encode("a b"),
        TEXT.encode("c"),
    ]
    assert sorted(dispatcher.aborted) == sorted(ids), "every stream is let go of"
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens == 12


async def test_each_prompt_without_a_seed_draws_its_own() -> None:
    dispatcher = hello()
    async with serving(dispatcher) as client:
        for fields in ({}, {"seed": None}, {"seed": 7}, {"seed": 0}):
            body = {"prompt": ["My name is"] * 3, "max_tokens": 1, **fields}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        await client.post("/v1/chat/completions", json=CHAT)
    seeds = [one.request.sampling.seed for one in dispatcher.started]
    drawn = [*seeds[:6], seeds[12]]
    assert len(set(drawn)) == 7
    assert all(0 <= seed < 1 << 64 for seed in drawn)
    assert seeds[6:12] == [7, 7, 7, 0, 0, 0]


async def test_token_ids_go_in_and_out() -> None:
    async with serving(hello()) as client:
        body = {"prompt": [5, 6], "return_token_ids": True, "max_tokens": 2, "n": 1}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["prompt_token_ids"] == [5, 6]
        assert choice["token_ids"] == TEXT.encode(HELLO)[:2]
        answer = (
            await client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})
        ).json()
    assert answer["prompt_token_ids"][0] == 1
    assert answer["choices"][0]["token_ids"] == [*TEXT.encode(HELLO), 2]
    assert answer["choices"][0]["stop_reason"] is None


async def test_best_of_returns_the_likeliest() -> None:
    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        assert request.sampling.n == 3
        assert request.sampling.logprobs == 0
        for index, (word, logprob) in enumerate([("poor", -3.0), ("best", -1.0), ("good", -2.0)]):
            ids = TEXT.encode(word)
            logprobs = tuple(TokenLogprobs(logprob) for _ in ids)
            last = updates_of(request, [2], sample_index=index)[0]
            yield [TokenUpdate(request.request_id, index, 1, 0, tuple(ids), logprobs), last]

    async with serving(ScriptedDispatcher(script)) as client:
        body = {"prompt": "x", "best_of": 3, "n": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["best", "good"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "world"}, "Hello 😀 ", "world"),
        ({"stop": ["it is", "o w"]}, "Hello 😀 world, ", "it is"),
        ({"stop": "world", "include_stop_str_in_output": True}, "Hello 😀 world", "world"),
        ({"stop": "Hel"}, "", "Hel"),
        ({"stop": "Hello 😀", "min_tokens": 1}, HELLO, None),
        ({"stop": "😀"}, "Hello ", "😀"),
        ({"stop": "nowhere"}, HELLO, None),
        ({"stop": "42.!"}, HELLO, None),
    ],
)
async def test_stop_strings(fields: dict[str, Any], text: str, reason: str | None) -> None:
    dispatcher = hello()
    async with serving(dispatcher) as client:
        answer = (await client.post("/v1/chat/completions", json={**CHAT, **fields})).json()
        streamed = await client.post(
            "/v1/chat/completions", json={**CHAT, **fields, "stream": True}
        )
    choice = answer["choices"][0]
    assert choice["message"]["content"] == text
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    assert dispatcher.finished_samples == ([0, 0] if reason else [])
    if reason == "Hel":
        assert answer["usage"]["completion_tokens"] == 1
        assert '"finish_reason":"stop","stop_reason":"Hel"' in streamed.text


async def test_stop_tokens_are_not_shown() -> None:
    word = TEXT.encode("Good")[0]

    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        yield updates_of(request, [*TEXT.encode("a b"), word])

    async with serving(ScriptedDispatcher(script)) as client:
        body: dict[str, Any] = {"prompt": "x", "stop_token_ids": [word]}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("a b", word)
        body["include_stop_str_in_output"] = True
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["text"] == "a bGood"


async def test_what_the_worker_gets() -> None:
    dispatcher = hello()
    async with serving(dispatcher) as client:
        body = {
            "prompt": "x " * 3000,
            "truncate_prompt_tokens": 5,
            "max_completion_tokens": 4,
            "priority": 2,
            "cache_salt": "s",
            "bad_words": ["the", "  ", "  the", "xylophone quartz"],
        }
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    started = dispatcher.started[0]
    assert list(started.request.prompt) == TEXT.encode("x " * 3000)[-5:]
    assert started.request.priority == 2
    assert started.request.namespace != b""
    assert started.timeout_s == 600.0
    words = ("the", " the", "xylophone quartz", " xylophone quartz")
    bad_words = started.request.sampling.bad_words
    assert bad_words == tuple(tuple(TEXT.encode(word)) for word in words)
    assert [len(word) > 1 for word in bad_words] == [False, False, True, True]
    assert started.request.sampling.logit_bias == ()


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/health/ready", "/version", "/v1/models", "/docs"]
)
async def test_head_answers_as_get_without_a_body(path: str) -> None:
    dispatcher = hello()
    async with serving(dispatcher) as client:
        for ready in (True, False):
            dispatcher.ready = ready
            get, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            assert head.headers["content-length"] == get.headers["content-length"]
            assert head.status_code == (503 if path == "/health/ready" and not ready else 200)


@pytest.mark.parametrize(("path", "status"), [("/nowhere?x", 404), ("/tokenize", 405)])
async def test_head_of_what_is_not_there(path: str, status: int) -> None:
    async with serving(hello()) as client:
        head = await client.head(path)
    assert (head.status_code, head.content) == (status, b"")
    assert int(head.headers["content-length"]) > 0


async def test_models_and_health() -> None:
    dispatcher = hello()
    async with serving(dispatcher) as client:
        card = (await client.get("/v1/models")).json()["data"][0]
        assert (card["id"], card["max_model_len"], card["object"]) == ("smol", 512, "model")
        assert (await client.get("/v1/models/smol")).json() == card
        for name in ("%73mol", "smol?a=%2F&b", "smol#x"):
            assert (await client.get(f"/v1/models/{name}")).json() == card
        assert (await client.get("/v1/models/other")).status_code == 404
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200
        dispatcher.ready = False
        not_ready = await client.get("/health/ready")
        assert (not_ready.status_code, not_ready.headers["retry-after"]) == (503, "1")
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/version")).json() == {"version": "0.1.0"}
        assert (await client.get("/status")).json() == dispatcher.cluster_status()
        assert (await client.get("/openapi.json")).status_code == 200


async def test_without_workers_the_router_s_own_name_holds() -> None:
    dispatcher = hello()
    dispatcher.model = None
    async with serving(dispatcher, configured(model={"served_name": "mine"})) as client:
        card = (await client.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("mine", 8192)


async def test_tokenize_and_detokenize() -> None:
    async with serving(hello()) as client:
        answer = (
            await client.post("/tokenize", json={"prompt": HELLO, "return_token_strs": True})
        ).json()
        assert answer["tokens"] == TEXT.encode(HELLO)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 512
        back = await client.post("/detokenize", json={"tokens": [*answer["tokens"], 2]})
        assert back.json() == {"prompt": HELLO + "<|im_end|>"}
        chat = (await client.post("/tokenize", json=CHAT)).json()
        rendered = TEXT.render_chat(CHAT["messages"])
        assert chat["tokens"] == TEXT.encode(rendered, add_special_tokens=False)
        empty = await client.post("/tokenize", json={})
        assert (empty.status_code, empty.json()["error"]["param"]) == (400, "prompt")
        wrong = await client.post("/detokenize", json={"tokens": [-1]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


async def test_metrics() -> None:
    async with serving(hello()) as client:
        await client.post("/v1/chat/completions", json={**CHAT, "n": 2})
        await client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2})
        await client.post("/v1/completions", json={"prompt": "", "temperature": 9})
        await client.get("/nowhere")
        lines = (await client.get("/metrics")).text.splitlines()
    labels = '{engine="0",model_name="smol"}'

    def value(series: str) -> float:
        return float(next(line for line in lines if line.startswith(series)).split()[-1])

    success = 'vllm:request_success_total{engine="0",finished_reason="%s",model_name="smol"}'
    assert value(success % "stop") == 1
    assert value(success % "length") == 2
    assert value(success % "abort") == 0
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    ):
        assert value(f"vllm:{name}_count{labels}") == 3
    num_hello, num_bye = len(TEXT.encode(HELLO)) + 1, len(TEXT.encode("Good day.")) + 1
    assert value(f"vllm:request_generation_tokens_sum{labels}") == num_hello + num_bye + 4
    arrivals = num_hello - 1 + num_bye - 1 + 2
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert value(f"vllm:{name}_count{labels}") == arrivals
    assert value(f"vllm:request_prefill_time_seconds_sum{labels}") == pytest.approx(0.75)
    assert value(f"vllm:request_queue_time_seconds_sum{labels}") == pytest.approx(1.5, abs=0.5)
    assert value('dovetail:http_responses_total{route="/v1/completions",status="200"}') == 1
    assert value('dovetail:http_responses_total{route="/v1/completions",status="400"}') == 1
    assert value('dovetail:http_responses_total{route="other",status="404"}') == 1
    for state in ("preparing", "waiting", "streaming"):
        assert value(f'dovetail:http_requests{{state="{state}"}}') == 0


async def test_several_tokens_of_one_arrival() -> None:
    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        ids = TEXT.encode("one two three END four")
        yield [TokenUpdate(request.request_id, 0, 1, 0, tuple(ids))]
        yield updates_of(request, [2])

    async with serving(ScriptedDispatcher(script)) as client:
        body = {**CHAT, "stop": "END", "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "one two three "
    shown = TEXT.decode(choice["token_ids"])
    assert shown.startswith("one two three END")
    assert "four" not in shown
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


async def test_an_empty_batch_changes_nothing() -> None:
    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        yield []
        yield updates_of(request, [5, 2])

    async with serving(ScriptedDispatcher(script)) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            listen("127.0.0.1", port)
    assert f"127.0.0.1:{port}: Address already in use" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"cannot listen on 203\.0\.113\.1:1"):
        listen("203.0.113.1", 1)


async def test_accepted_sockets_have_nodelay() -> None:
    with listen("127.0.0.1", 0) as listening:
        listening.setblocking(True)
        with socket.create_connection(listening.getsockname()):
            accepted, _ = await asyncio.to_thread(listening.accept)
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_script_that_ends_early_is_an_error() -> None:
    for body in ({"prompt": "x"}, {"prompt": ["x", "y"]}):
        async with serving(ScriptedDispatcher(playing([]))) as client:
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "generation_failed"
