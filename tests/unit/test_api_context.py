"""How a prompt and its answer share the model's context."""

from __future__ import annotations

import pytest

from core.errors import RequestError
from router.api.context import fit_to_context, truncate_prompt
from router.api.generation_params import GenerationParams, Vocabulary
from router.api.requests import read_completion


def params(**fields: object) -> GenerationParams:
    return read_completion({"prompt": "x", "echo": True, **fields}, Vocabulary(100, (2,))).params


@pytest.mark.parametrize(
    ("num_prompt", "asked", "default", "expected"),
    [
        (10, None, None, 90),
        (10, None, 16, 16),
        (90, None, 16, 10),
        (10, 90, None, 90),
        (99, 1, 16, 1),
        (99, 0, 16, 1),
    ],
)
def test_max_tokens(num_prompt: int, asked: int | None, default: int | None, expected: int) -> None:
    sampling = fit_to_context(
        params(max_tokens=asked), num_prompt, max_model_len=100, default_max=default
    )
    assert sampling.max_tokens == expected


@pytest.mark.parametrize(("num_prompt", "asked"), [(100, None), (101, 1), (10, 91), (100, 1)])
def test_beyond_the_context(num_prompt: int, asked: int | None) -> None:
    with pytest.raises(RequestError, match="context is 100 tokens") as caught:
        fit_to_context(params(max_tokens=asked), num_prompt, max_model_len=100, default_max=16)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_an_empty_prompt() -> None:
    with pytest.raises(RequestError, match="empty"):
        fit_to_context(params(), 0, max_model_len=100, default_max=16)


def test_min_tokens_never_exceed_max_tokens() -> None:
    sampling = fit_to_context(params(min_tokens=50), 90, max_model_len=100, default_max=16)
    assert sampling.min_tokens == sampling.max_tokens == 10


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, 200),
        ({"truncate_prompt_tokens": 50}, 50),
        ({"truncate_prompt_tokens": 100}, 100),
        ({"truncate_prompt_tokens": -1}, 99),
        ({"truncate_prompt_tokens": -1, "max_tokens": 30}, 70),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0}, 99),
    ],
)
def test_truncation_keeps_the_end(fields: dict[str, object], kept: int) -> None:
    prompt = tuple(range(200))
    assert truncate_prompt(prompt, params(**fields), max_model_len=100) == prompt[-kept:]


def test_more_than_the_context_is_not_kept() -> None:
    with pytest.raises(RequestError, match="= 101: must be at most 100, the model") as caught:
        truncate_prompt((1, 2), params(truncate_prompt_tokens=101), max_model_len=100)
    assert (caught.value.status, caught.value.param) == (400, "truncate_prompt_tokens")
