"""What answers say of prompts, over real HTTP: echo, log-probabilities, batches, truncation."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from core.request import FinishReason
from tests.router_server import events, serving, smollm2_text
from tests.scripted_dispatcher import ScriptedDispatcher, saying, updates_of

pytestmark = pytest.mark.anyio

TEXT = smollm2_text()
SAID = "Good day."
GIVEN = "The capital of Italy is"
IDS = TEXT.encode(GIVEN)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def said() -> ScriptedDispatcher:
    return ScriptedDispatcher(saying(TEXT, SAID, "Good night."))


async def post(
    client: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions"
) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a stream's choices, one a chunk."""
    answer = await client.post("/v1/completions", json={**body, "stream": True})
    chunks = [json.loads(event) for event in events(answer.text)[:-1]]
    return [choice for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize("prompt", [GIVEN, IDS])
async def test_an_echo_begins_with_the_prompt(prompt: str | list[int]) -> None:
    body = {"prompt": prompt, "echo": True, "n": 2, "max_tokens": 9}
    async with serving(said()) as client:
        answer = await post(client, body)
        chunks = await streamed(client, body)
    assert [one["text"] for one in answer["choices"]] == [GIVEN + SAID, GIVEN + "Good night."]
    assert answer["usage"]["prompt_tokens"] == len(IDS)
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert own[0]["text"] == GIVEN
        assert (own[0]["finish_reason"], own[0]["logprobs"]) == (None, None)
        assert "".join(chunk["text"] for chunk in own) == answer["choices"][index]["text"]
        assert own[-1]["finish_reason"] == "stop"


async def test_an_echo_s_logprobs_hold_the_prompt_s_tokens_first() -> None:
    body = {"prompt": GIVEN, "echo": True, "logprobs": 1, "max_tokens": 2, "n": 2}
    async with serving(dispatcher := said()) as client:
        answer = await post(client, body)
        chunks = await streamed(client, body)
    assert [one.request.sampling.prompt_logprobs for one in dispatcher.started] == [1, 1]
    shape = answer["choices"][0]["logprobs"]
    tokens = [TEXT.token(token_id)[0] for token_id in [*IDS, *TEXT.encode(SAID)[:2]]]
    assert shape["tokens"] == tokens
    assert shape["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -0.5, -0.5]
    assert shape["top_logprobs"][0] is None
    assert shape["top_logprobs"][1] == {TEXT.token(19)[0]: -0.5, tokens[1]: -1.0}
    offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
    assert shape["text_offset"] == offsets
    text = answer["choices"][0]["text"]
    assert [text[at:].startswith(t) for at, t in zip(offsets, tokens, strict=True)] == [True] * 7
    for index in (0, 1):
        parts = [chunk["logprobs"] for chunk in chunks if chunk["index"] == index]
        whole = answer["choices"][index]["logprobs"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for part in parts for value in part[name]] == whole[name]


async def test_the_prompt_alone() -> None:
    """lm-eval's and OpenAI's way to score a text: nothing is generated."""
    body = {"prompt": [IDS, IDS[:1]], "echo": True, "logprobs": 0, "max_tokens": 0, "n": 2}
    dispatcher = ScriptedDispatcher(saying(TEXT, SAID))
    async with serving(dispatcher) as client:
        answer = await post(client, body)
        chunks = await streamed(client, body)
        plain = await post(client, {"prompt": GIVEN, "echo": True, "max_tokens": 0, "stop": "G"})
    assert {one.request.sampling.max_tokens for one in dispatcher.started} == {1}
    first = TEXT.token(IDS[0])[0]
    assert [one["text"] for one in answer["choices"]] == [GIVEN, GIVEN, first, first]
    assert [one["finish_reason"] for one in answer["choices"]] == ["length"] * 4
    shape = answer["choices"][1]["logprobs"]
    assert shape["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0]
    assert shape["top_logprobs"][1] == {TEXT.token(IDS[1])[0]: -1.0}
    assert answer["choices"][2]["logprobs"]["token_logprobs"] == [None]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(IDS) + 1
    own = [chunk for chunk in chunks if chunk["index"] == 0]
    assert [(one["text"], one["finish_reason"]) for one in own] == [(GIVEN, None), ("", "length")]
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == (GIVEN, None)


async def test_a_token_that_ended_the_worker_s_sample_is_dropped_as_well() -> None:
    async with serving(ScriptedDispatcher(saying(TEXT, ""))) as client:
        answer = await post(client, {"prompt": "x", "echo": True, "max_tokens": 0})
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("x", "length", None)


async def test_prompt_logprobs_in_vllm_s_places() -> None:
    async with serving(dispatcher := said()) as client:
        text = await post(client, {"prompt": [GIVEN, "a b"], "prompt_logprobs": 1, "n": 2})
        chat = await post(client, {**CHAT, "prompt_logprobs": 0}, "/v1/chat/completions")
        without = await post(client, CHAT, "/v1/chat/completions")
    assert "prompt_logprobs" not in text
    lengths = [len(choice["prompt_logprobs"]) for choice in text["choices"]]
    assert lengths == [len(IDS), len(IDS), 2, 2]
    scored = text["choices"][0]["prompt_logprobs"]
    assert scored[0] is None
    assert scored[2] == {
        str(IDS[2]): {"logprob": -2.0, "rank": 2, "decoded_token": TEXT.token(IDS[2])[0]},
        "19": {"logprob": -0.5, "rank": 1, "decoded_token": TEXT.token(19)[0]},
    }
    assert text["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in chat["choices"][0]
    prompt = dispatcher.started[2].request.prompt
    assert [one and list(one) for one in chat["prompt_logprobs"]] == [
        None,
        *([str(token_id)] for token_id in prompt[1:]),
    ]
    assert "prompt_logprobs" not in without
    assert dispatcher.started[3].request.sampling.prompt_logprobs is None


async def test_choices_of_a_batch_are_numbered_through() -> None:
    """Choice i * n + j is sample j of prompt i, with its prompt before it."""
    body = {"prompt": ["a", "b c", "d"], "n": 2, "echo": True, "max_tokens": 1}
    async with serving(dispatcher := said()) as client:
        answer = await post(client, body)
        ids = await post(client, {"prompt": [[5], [6, 7]], "return_token_ids": True})
    texts = [one["text"] for one in answer["choices"]]
    assert texts == [given + "Good" for given in ("a", "a", "b c", "b c", "d", "d")]
    assert [one["index"] for one in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 9, "3 of each in the script"
    assert [list(one.request.prompt) for one in dispatcher.started[3:]] == [[5], [6, 7]]
    assert [one["prompt_token_ids"] for one in ids["choices"]] == [[5], [6, 7]]


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"), [(3, 4, 3), (512, 4, 400), (-1, 4, 400), (-1, 200, 312)]
)
async def test_usage_counts_what_truncation_kept(keep: int, max_tokens: int, kept: int) -> None:
    body = {
        "prompt": list(range(20, 420)),
        "truncate_prompt_tokens": keep,
        "max_tokens": max_tokens,
        "echo": True,
    }
    async with serving(dispatcher := said()) as client:
        answer = await post(client, body)
        refused = await client.post("/v1/completions", json={**body, "truncate_prompt_tokens": 513})
        words = {"prompt": "one two three four", "truncate_prompt_tokens": 2, "echo": True}
        cut = await post(client, {**words, "max_tokens": 0})
    assert dispatcher.started[0].request.prompt == tuple(range(420 - kept, 420))
    assert answer["usage"]["prompt_tokens"] == kept
    assert cut["choices"][0]["text"] == " three four"
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "truncate_prompt_tokens",
    )
    assert "at most 512" in refused.json()["error"]["message"]


async def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    size = TEXT.vocab_size
    async with serving(said()) as client:
        for prompt in ([size], [[1], [5, size]], [-1]):
            refused = await client.post("/v1/completions", json={"prompt": prompt})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
            assert f"between 0 and {size - 1}" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, SAID),
        ({"skip_special_tokens": False}, SAID),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, SAID + "<|im_end|>"),
        ({"include_stop_str_in_output": True}, SAID),
    ],
)
async def test_special_tokens_show_where_they_are_asked_for(
    fields: dict[str, Any], text: str
) -> None:
    async with serving(said()) as client:
        answer = await post(client, {"prompt": "x", **fields})
    assert answer["choices"][0]["text"] == text


async def test_eos_that_ends_nothing_is_text_where_special_tokens_show() -> None:
    ids = [*TEXT.encode("a"), 2, *TEXT.encode(" b")]
    async with serving(ScriptedDispatcher(ending_by_length(ids))) as client:
        body: dict[str, Any] = {"prompt": "x", "ignore_eos": True}
        hidden = await post(client, body)
        shown = await post(client, {**body, "skip_special_tokens": False})
    assert hidden["choices"][0]["text"] == "a b"
    assert shown["choices"][0]["text"] == "a<|im_end|> b"


def ending_by_length(ids: list[int]) -> Any:
    async def script(request: Any) -> Any:
        yield updates_of(request, ids, finish=FinishReason.LENGTH)

    return script


async def test_a_stop_string_counts_behind_min_tokens() -> None:
    """The whole string must come after them; a part from before does not complete it."""
    async with serving(ScriptedDispatcher(saying(TEXT, "end one end two"))) as client:
        first = await post(client, {"prompt": "x", "stop": "end"})
        second = await post(client, {"prompt": "x", "stop": "end", "min_tokens": 1})
        third = await post(client, {"prompt": "x", "stop": "end", "min_tokens": 8, "max_tokens": 9})
    assert (first["choices"][0]["text"], first["choices"][0]["stop_reason"]) == ("", "end")
    assert second["choices"][0]["text"] == "end one "
    assert third["choices"][0]["text"] == "end one end two"
    assert first["usage"]["completion_tokens"] == 1


async def test_an_answer_goes_on_within_the_last_message() -> None:
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "One, two,"},
    ]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    async with serving(dispatcher := said()) as client:
        answer = await post(client, body, "/v1/chat/completions")
    prompt = TEXT.decode(dispatcher.started[0].request.prompt, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nOne, two,")
    assert answer["choices"][0]["message"]["content"] == SAID


async def test_templates_get_their_variables_and_no_prompt_where_none_is_wanted() -> None:
    async with serving(dispatcher := said()) as client:
        for fields in ({}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"x": 1}}):
            await post(client, {**CHAT, **fields}, "/v1/chat/completions")
    prompts = [
        TEXT.decode(one.request.prompt, skip_special_tokens=False) for one in dispatcher.started
    ]
    assert [one.endswith("<|im_start|>assistant\n") for one in prompts] == [True, False, True]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("structured_outputs", {"regex": "a+"}),
        ("use_beam_search", True),
        ("suffix", "x"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("echo", True),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(path: str, name: str, value: Any) -> None:
    """Where the route knows the field; the other one says that it ignored it, or does it."""
    is_chat = path.startswith("/v1/chat")
    elsewhere = {"suffix": not is_chat, "tools": is_chat, "echo": is_chat}
    body = {**CHAT, "prompt": "x"}
    body.pop("prompt" if is_chat else "messages")
    async with serving(said()) as client:
        answer = await client.post(path, json={**body, name: value})
    if not elsewhere.get(name, True):
        assert answer.status_code == 200
        assert answer.headers.get("x-dovetail-ignored") == (None if name == "echo" else name)
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "unsupported_parameter",
        name,
    )
