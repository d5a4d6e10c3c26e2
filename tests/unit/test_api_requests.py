"""Request bodies: what official clients send is read, and each slip is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from core.errors import RequestError
from router.api.fields import parse_body, shown
from router.api.generation_params import Vocabulary
from router.api.requests import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    read_chat,
    read_completion,
)

VOCABULARY = Vocabulary(size=100, eos_token_ids=(2,))
USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return read_chat({"messages": USER, **fields}, VOCABULARY)


def completion(prompt: Any = "hi", **fields: Any) -> CompletionRequest:
    return read_completion({"prompt": prompt, **fields}, VOCABULARY)


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_openai_s() -> None:
    params = chat().params
    sampling = params.sampling
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1.0, 1.0, 0)
    assert sampling.eos_token_ids == (2,)
    assert sampling.logprobs is None
    assert params.max_tokens is None
    assert params.skip_special_tokens
    assert not params.stream
    assert params.ignored == ()


def test_every_sampling_field_is_honoured() -> None:
    params = chat(
        n=3,
        max_tokens=20,
        min_tokens=2,
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": 100, "7": -1.5},
        stop_token_ids=[9],
        ignore_eos=True,
        seed=-1,
        logprobs=True,
        top_logprobs=5,
        stop=["a", "b"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        truncate_prompt_tokens=10,
        return_token_ids=True,
        cache_salt="pepper",
        priority=-3,
    ).params
    sampling = params.sampling
    assert (sampling.n, sampling.min_tokens, sampling.top_k) == (3, 2, 40)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert sampling.repetition_penalty == 1.5
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2.0, 2.0)
    assert sampling.logit_bias == ((5, 100.0), (7, -1.5))
    assert sampling.stop_token_ids == (9,)
    assert sampling.ignore_eos
    assert sampling.seed == (1 << 64) - 1
    assert sampling.logprobs == params.logprobs == 5
    assert params.stop == ("a", "b")
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens
    assert (params.truncate_prompt_tokens, params.max_tokens) == (10, 20)
    assert params.return_token_ids
    assert (params.cache_salt, params.priority) == ("pepper", -3)


def test_a_given_seed_is_told_from_a_missing_one() -> None:
    assert not chat().params.has_seed
    assert not chat(seed=None).params.has_seed
    assert chat(seed=0).params.has_seed
    assert chat(seed=7).params.sampling.seed == 7


@pytest.mark.parametrize("top_k", [100, 101, 1 << 32, 10**30])
def test_a_top_k_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    assert chat(top_k=top_k).params.sampling.top_k == 100


def test_null_means_not_given() -> None:
    names = ["temperature", "n", "stop", "logit_bias", "seed", "max_tokens", "tools", "stream"]
    assert chat(**dict.fromkeys(names)).params.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3.5}, "temperature = 3.5: must be between 0 and 2"),
        ({"temperature": "hot"}, 'temperature = "hot": must be a number between 0 and 2'),
        ({"temperature": True}, "temperature = true: must be a number between 0 and 2"),
        ({"top_p": 0}, "top_p = 0: must be greater than 0 and at most 1"),
        ({"top_k": -2}, "top_k = -2: must be at least -1"),
        ({"top_k": 1.5}, "top_k = 1.5: must be a whole number at least -1"),
        ({"min_p": 1.1}, "min_p = 1.1: must be between 0 and 1"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0: must be greater than 0"),
        ({"presence_penalty": 2.5}, "presence_penalty = 2.5: must be between -2 and 2"),
        ({"frequency_penalty": -3}, "frequency_penalty = -3: must be between -2 and 2"),
        ({"n": 0}, "n = 0: must be between 1 and 128"),
        ({"best_of": 1, "n": 2}, "best_of = 1: must be at least n (2)"),
        ({"best_of": 2, "stream": True}, "best_of = 2: must be equal to n (1) when stream"),
        ({"max_tokens": 0}, "max_tokens = 0: must be at least 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "must be equal to max_tokens (1)"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens = 3: must be at most max_tokens (2)"),
        ({"seed": 1 << 64}, "seed = 18446744073709551616: must be between"),
        ({"stop": ["a", 1]}, 'stop = ["a",1]: must be a string or a list of strings'),
        ({"stop": 5}, "stop = 5: must be a string or a list of strings"),
        ({"stop": ["", "a"]}, "must be without empty strings"),
        ({"stop": ["a"] * 65}, "must be at most 64 strings"),
        ({"stop_token_ids": [100]}, "stop_token_ids = 100: must be token ids between 0 and 99"),
        ({"stop_token_ids": "x"}, 'stop_token_ids = "x": must be a list of token ids'),
        ({"logit_bias": {"x": 1}}, 'logit_bias = {"x":1}: must be keyed by token ids'),
        ({"logit_bias": {"100": 1}}, "must be keyed by token ids from 0 to 99"),
        ({"logit_bias": {"9" * 5000: 1}}, "must be keyed by token ids from 0 to 99"),
        ({"logit_bias": {"1": 101}}, "must be between -100 and 100"),
        ({"logit_bias": {"1": "x"}}, "must be an object of numbers"),
        ({"logit_bias": [1]}, "logit_bias = [1]: must be an object"),
        ({"stream": "yes"}, 'stream = "yes": must be true or false'),
        ({"stream_options": {"include_usage": True}}, "must be left out unless stream is true"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage = 1: must be true or false",
        ),
        ({"logprobs": 1}, "logprobs = 1: must be true or false"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs = 21: must be between 0 and 20"),
        ({"top_logprobs": 2}, "top_logprobs = 2: must be left out unless logprobs is true"),
        ({"prompt_logprobs": 21}, "prompt_logprobs = 21: must be between 0 and 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs = -1: must be between 0 and 20"),
        ({"prompt_logprobs": 1, "stream": True}, "must be left out when stream is true"),
        (
            {"continue_final_message": True},
            "continue_final_message = true: must be false unless add_generation_prompt is false",
        ),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens = -2: must be at least -1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens = 0: must be at least 1"),
        ({"cache_salt": ""}, 'cache_salt = "": must be a string that is not empty'),
        ({"priority": "high"}, 'priority = "high": must be a whole number'),
        ({"model": 3}, "model = 3: must be a string"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs = []: must be an object"),
    ],
)
def test_slips_are_named(fields: dict[str, Any], message: str) -> None:
    error = refused(**fields)
    assert message in error.message
    assert error.param is not None
    assert error.param.split(".")[0] in fields


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"json": {}}),
        ("guided_json", {"type": "object"}),
        ("echo", True),
        ("use_beam_search", True),
        ("modalities", ["audio"]),
        ("reasoning_effort", "high"),
        ("chat_template", "{{ x }}"),
        ("allowed_token_ids", [1]),
        ("length_penalty", 0.5),
    ],
)
def test_unsupported_fields_with_effect_are_refused(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert (error.code, error.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("echo", False),
        ("modalities", ["text"]),
        ("length_penalty", 1.0),
        ("user", "me"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("service_tier", "auto"),
        ("safety_identifier", "x"),
        ("prompt_cache_key", "x"),
        ("parallel_tool_calls", True),
    ],
)
def test_fields_without_effect_are_accepted(name: str, value: Any) -> None:
    assert chat(**{name: value}).params.ignored == ()


def test_unknown_fields_are_named() -> None:
    messages = [{"role": "user", "content": "hi", "refusal": None, "mood": "good"}]
    read = read_chat({"messages": messages, "wobble": 1, "wibble": None}, VOCABULARY)
    assert read.params.ignored == ("wobble", "wibble", "messages[].mood")


def test_message_contents() -> None:
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}],
        },
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": None, "tool_calls": [], "name": "bot"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
    ]
    assert read_chat({"messages": messages}, VOCABULARY).messages == (
        {"role": "system", "content": "a\n"},
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": "", "name": "bot"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "x\ny"},
    )


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        (None, "messages", "messages: is required"),
        ([], "messages", "must hold at least one message"),
        ("hi", "messages", 'messages = "hi": must be a list of messages'),
        (["hi"], "messages[0]", "must be an object with role and content"),
        ([{"content": "x"}], "messages[0].role", "messages[0].role = null: must be one of"),
        ([{"role": "bot"}], "messages[0].role", 'messages[0].role = "bot": must be one of'),
        ([{"role": "user", "content": 5}], "messages[0].content", "must be a string, null"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "must be an object"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
            "only text parts are supported",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "text = null: must be a string",
        ),
        ([{"role": "user", "name": 1}], "messages[0].name", "messages[0].name = 1: must be a str"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "x"}]}],
            "messages[0].tool_calls",
            "is not supported",
        ),
    ],
)
def test_message_slips_are_named(messages: Any, param: str, message: str) -> None:
    error = refused(messages=messages)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_in_every_shape(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert completion(prompt).prompts == prompts


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []]])
def test_empty_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        completion(prompt)
    assert caught.value.code == "empty_prompt"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt: is required"),
        (5, "prompt = 5: must be a string, a list"),
        ([1, "a"], r'prompt = \[1,"a"\]: must be a string, a list'),
        ([1, True], "must be a string, a list"),
        ([100], "prompt = 100: must be token ids between 0 and 99"),
        ([[-1]], "prompt = -1: must be token ids"),
        (["a"] * (MAX_PROMPTS + 1), "at most 256 prompts"),
    ],
)
def test_prompt_slips_are_named(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        completion(prompt)


def test_completions_have_their_own_logprobs() -> None:
    assert completion(logprobs=3).params.logprobs == 3
    assert completion(logprobs=0).params.sampling.logprobs == 0
    assert completion().params.sampling.logprobs is None
    with pytest.raises(RequestError, match="logprobs = true: must be a whole number"):
        completion(logprobs=True)
    with pytest.raises(RequestError, match='suffix = "x": is not supported'):
        completion(suffix="x")


def test_an_echo_and_a_scored_prompt() -> None:
    assert chat(prompt_logprobs=0).params.sampling.prompt_logprobs == 0
    assert completion().params.sampling.prompt_logprobs is None
    alone = completion(echo=True, max_tokens=0, logprobs=1).params
    assert (alone.echo, alone.max_tokens, alone.sampling.prompt_logprobs) == (True, 0, 1)
    assert alone.prompt_logprobs is None
    both = completion(echo=True, logprobs=1, prompt_logprobs=3).params
    assert (both.logprobs, both.prompt_logprobs, both.sampling.prompt_logprobs) == (1, 3, 3)
    assert completion(echo=True).params.sampling.prompt_logprobs is None
    assert completion(logprobs=2).params.sampling.prompt_logprobs is None
    for fields in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}):
        with pytest.raises(RequestError, match="max_tokens = 0: must be at least 1"):
            completion(**fields)
    with pytest.raises(RequestError, match="max_tokens = 0: must be at least 1"):
        chat(max_tokens=0)


def test_an_open_last_message() -> None:
    read = chat(continue_final_message=True, add_generation_prompt=False)
    assert (read.continue_final_message, read.add_generation_prompt) == (True, False)
    assert not chat(continue_final_message=False).continue_final_message


def test_best_of_generates_more_and_needs_logprobs() -> None:
    params = completion(best_of=4, n=2).params
    assert (params.n, params.sampling.n) == (2, 4)
    assert params.sampling.logprobs == 0
    assert params.logprobs is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nope",
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b"[1]",
        b'"x"',
        b"null",
        b"3",
        b"true",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": "\\ud800"}',
    ],
)
def test_bodies_that_are_no_object_are_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match="the body ") as caught:
        parse_body(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_long_values_are_cut_in_messages() -> None:
    assert len(shown("x" * 1000)) == 80
    assert shown({"a": None}) == '{"a":null}'


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e308])
def test_numbers_are_finite(value: float) -> None:
    fields = {"repetition_penalty": value}
    if math.isinf(value):
        assert refused(**fields).param == "repetition_penalty"
    else:
        assert chat(**fields).params.sampling.repetition_penalty == value
