"""Bodies as clients send them are answered, and their streams read as those clients read them."""

from __future__ import annotations

from typing import Any

import pytest

from tests import client_requests as clients
from tests.client_requests import CHAT, REQUESTS, ClientRequest
from tests.router_server import serving, smollm2_text
from tests.scripted_dispatcher import ScriptedDispatcher, saying

pytestmark = pytest.mark.anyio

MODEL = smollm2_text()
SAID = "Hello 😀 world, it is 42."
READERS = (clients.read_as_vllm_bench, clients.read_as_guidellm, clients.read_as_aiperf)


@pytest.mark.parametrize("request_", REQUESTS, ids=[request.client for request in REQUESTS])
async def test_a_client_is_answered(request_: ClientRequest) -> None:
    client, path, body, headers = request_
    async with serving(ScriptedDispatcher(saying(MODEL, SAID))) as http:
        answer = await http.post(path, json=body, headers=dict(headers))
    assert answer.status_code == 200, answer.text
    assert "x-dovetail-ignored" not in answer.headers, client
    asked = body.get("max_tokens") or body.get("max_completion_tokens")
    said = MODEL.decode(MODEL.encode(SAID)[:asked])
    if body.get("stream"):
        check_stream(answer.text, said, asked, body, is_chat=path == CHAT)
    else:
        check_whole(answer.json(), said, path, body)


def check_stream(text: str, said: str, asked: Any, body: dict[str, Any], *, is_chat: bool) -> None:
    has_usage = bool(body.get("stream_options"))
    for read in (reader(text, is_chat=is_chat) for reader in READERS):
        assert read.text == said
        assert read.num_chunks >= 1
        if has_usage:
            assert read.output_tokens == asked


def check_whole(answer: dict[str, Any], said: str, path: str, body: dict[str, Any]) -> None:
    prompts = body.get("prompt")
    count = len(prompts) if isinstance(prompts, list) else 1
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    for choice in answer["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert text.endswith(said.partition("\n")[0])
        assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_lm_eval_finds_each_prompt_token_s_score_where_it_looks() -> None:
    (request_,) = [one for one in REQUESTS if one.client == "lm-eval loglikelihood"]
    async with serving(ScriptedDispatcher(saying(MODEL, SAID))) as http:
        answer = (await http.post(request_.path, json=request_.body)).json()
    # The scripted dispatcher says -i of token i; the continuation is what follows the context.
    read = clients.read_as_lm_eval(answer, [5, 4])
    assert read == [(-5.0, False), (-4.0 - 5.0 - 6.0, False)]
    assert answer["usage"] == {
        "prompt_tokens": 13,
        "completion_tokens": 2,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 6},
    }


async def test_usage_grows_with_each_chunk_where_guidellm_asks_for_it() -> None:
    for request_ in REQUESTS:
        if not request_.client.startswith("guidellm"):
            continue
        async with serving(ScriptedDispatcher(saying(MODEL, SAID))) as http:
            text = (await http.post(request_.path, json=request_.body)).text
        chunks = [one for one in clients.payloads(text) if one["choices"]]
        counts = [one["usage"]["completion_tokens"] for one in chunks if one["usage"]]
        assert counts == list(range(1, 9))
        assert all(one["usage"]["prompt_tokens"] > 0 for one in chunks if one["usage"])
