"""Prompts' log-probabilities: parts that are cut, and the two shapes in which they are shown."""

from __future__ import annotations

import pytest

from core.request import PromptLogprobs, TokenLogprobs
from router.api.logprobs import completion_logprobs, echo_logprobs, prompt_logprobs

PROMPT = (10, 11, 12, 13)
FIRST = PromptLogprobs(1, (-1.5,), (3,), 2, (20, 21), (-0.25, -0.5))
REST = PromptLogprobs(2, (-0.25, -float("inf")), (1, 99), 2, (12, 21, 20, 12), (-0.25, -2.0) * 2)
PARTS = (FIRST, REST)


def token_of(token_id: int) -> tuple[str, bytes]:
    text = f"t{token_id} "
    return text, text.encode()


def test_parts_are_cut_at_what_is_known() -> None:
    assert (FIRST.end, REST.end) == (2, 4)
    assert REST.since(1) is REST
    assert REST.since(2) is REST
    assert REST.since(3) == PromptLogprobs(3, (-float("inf"),), (99,), 2, (20, 12), (-0.25, -2.0))
    assert REST.since(4) is None
    assert REST.since(9) is None
    assert PromptLogprobs(1, (-1.0, -2.0), (1, 2)).since(2) == PromptLogprobs(2, (-2.0,), (2,))


def test_vllm_s_shape() -> None:
    shown = prompt_logprobs(PROMPT, PARTS, 1, token_of)
    assert shown == [
        None,
        {
            "11": {"logprob": -1.5, "rank": 3, "decoded_token": "t11 "},
            "20": {"logprob": -0.25, "rank": 1, "decoded_token": "t20 "},
        },
        {"12": {"logprob": -0.25, "rank": 1, "decoded_token": "t12 "}},
        {
            "13": {"logprob": -9999.0, "rank": 99, "decoded_token": "t13 "},
            "20": {"logprob": -0.25, "rank": 1, "decoded_token": "t20 "},
        },
    ]
    without = prompt_logprobs(PROMPT, PARTS, 0, token_of)
    assert [None if one is None else list(one) for one in without] == [None, ["11"], ["12"], ["13"]]
    assert prompt_logprobs(PROMPT[:1], (), 5, token_of) == [None]


def test_openai_s_shape_of_an_echo() -> None:
    shape, offset = echo_logprobs(PROMPT, PARTS, 1, token_of)
    assert shape == {
        "tokens": ["t10 ", "t11 ", "t12 ", "t13 "],
        "token_logprobs": [None, -1.5, -0.25, -9999.0],
        "top_logprobs": [
            None,
            {"t20 ": -0.25, "t11 ": -1.5},
            {"t12 ": -0.25},
            {"t20 ": -0.25, "t13 ": -9999.0},
        ],
        "text_offset": [0, 4, 8, 12],
    }
    assert offset == 16
    alone, offset = echo_logprobs(PROMPT[:1], (), 1, token_of)
    assert (alone["tokens"], alone["token_logprobs"], offset) == (["t10 "], [None], 4)


def test_of_alternatives_that_look_alike_the_most_likely_one_is_shown() -> None:
    """Parts of characters all show as U+FFFD; lm-eval asks whether the largest is the token's."""
    entry = TokenLogprobs(-0.25, (20, 21, 22), (-0.25, -0.5, -1.0))
    shape, _ = completion_logprobs((20,), (entry,), 3, lambda _: ("\ufffd", b"\xf0"), 0)
    assert shape["top_logprobs"] == [{"\ufffd": -0.25}]


def test_a_missing_score_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="zip"):
        prompt_logprobs(PROMPT, (FIRST,), 1, token_of)
    with pytest.raises(ValueError, match="zip"):
        echo_logprobs(PROMPT, (FIRST,), 1, token_of)
