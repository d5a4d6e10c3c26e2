"""The judge of chaos runs tells what is lost, wrong and repeated from what is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.sampling_params import SamplingParams
from tests.chaos_client import Answered, Told
from tests.chaos_judge import Kind, judge
from tests.chaos_requests import TEXT, Request

PROMPT = tuple(range(100, 140))
REQUEST = Request(
    path=TEXT,
    body={"stream": False, "logprobs": 0, "n": 2},
    disaggregate="auto",
    prompts=(PROMPT,),
    sampling=SamplingParams(n=2, seed=5, temperature=1.0, max_tokens=12),
    echo=True,
)


def right_answer(request: Request) -> Answered:
    """Return what the oracle says, as a client would have collected it."""
    answered = Answered(status=200, num_ends=1)
    for index, right in enumerate(request.expected):
        answered.told[index] = Told(
            prompt=right.prompt,
            token_ids=list(right.token_ids),
            text=right.text,
            finish_reasons=[right.finish_reason],
            logprobs=list(right.logprobs),
        )
    num_tokens = sum(len(right.token_ids) for right in request.expected)
    answered.usage = {"prompt_tokens": 40, "completion_tokens": num_tokens}
    return answered


def test_a_right_answer_has_no_faults() -> None:
    assert judge(REQUEST, right_answer(REQUEST)) == []


def _tokens(change: Callable[[list[int]], list[int]]) -> Callable[[Answered], None]:
    def spoil(answered: Answered) -> None:
        answered.told[1].token_ids = change(answered.told[1].token_ids)
        answered.told[1].logprobs = [*REQUEST.expected[1].logprobs[: len(PROMPT)]]
        answered.told[1].logprobs += [-0.5] * len(answered.told[1].token_ids)

    return spoil


def _set(**fields: object) -> Callable[[Answered], None]:
    def spoil(answered: Answered) -> None:
        for name, value in fields.items():
            setattr(answered.told[1] if hasattr(Told(), name) else answered, name, value)

    return spoil


SPOILED = {
    "error": (Kind.LOST, _set(error="x")),
    "status": (Kind.LOST, _set(status=503)),
    "no end": (Kind.LOST, _set(num_ends=0)),
    "no choice": (Kind.LOST, lambda answered: answered.told.pop(1)),
    "no finish": (Kind.LOST, _set(finish_reasons=[])),
    "short": (Kind.LOST, _tokens(lambda ids: ids[:-2])),
    "gap": (Kind.LOST, _tokens(lambda ids: ids[:4] + ids[5:])),
    "gap and end": (Kind.LOST, _tokens(lambda ids: ids[:4] + ids[-1:])),
    "twice": (Kind.REPEATED, _tokens(lambda ids: [*ids[:5], *ids[4:]])),
    "last twice": (Kind.REPEATED, _tokens(lambda ids: [*ids, ids[-1]])),
    "all twice": (Kind.REPEATED, _tokens(lambda ids: ids + ids)),
    "two finishes": (Kind.REPEATED, _set(finish_reasons=["length", "length"])),
    "two ends": (Kind.REPEATED, _set(num_ends=2)),
    "other token": (Kind.WRONG, _tokens(lambda ids: [*ids[:5], 3, 4, 5])),
    "more": (Kind.WRONG, _tokens(lambda ids: [*ids, 3])),
    "finish": (Kind.WRONG, _set(finish_reasons=["stop"])),
    "text": (Kind.WRONG, _set(text="x")),
    "prompt": (Kind.WRONG, _set(prompt=(1, 2))),
    "logprobs": (Kind.WRONG, _set(logprobs=[])),
    "usage": (Kind.WRONG, _set(usage={"prompt_tokens": 40, "completion_tokens": 25})),
    "other choice": (Kind.WRONG, lambda answered: answered.told.update({7: Told()})),
}


@pytest.mark.parametrize("name", SPOILED)
def test_each_way_of_spoiling_an_answer_is_told_by_its_kind(name: str) -> None:
    kind, spoil = SPOILED[name]
    answered = right_answer(REQUEST)
    spoil(answered)
    assert judge(REQUEST, answered)[0].kind is kind


def test_of_a_client_that_left_only_what_came_is_judged() -> None:
    answered = right_answer(REQUEST)
    answered.has_left, answered.num_ends, answered.usage = True, 0, None
    told = answered.told[1]
    del answered.told[0]
    told.token_ids, told.text, told.finish_reasons = told.token_ids[:3], "", []
    told.logprobs = told.logprobs[: len(PROMPT) + 3]
    assert judge(REQUEST, answered) == []
    first, second, third, fourth, fifth, *_ = REQUEST.expected[1].token_ids
    for kind, spoiled in (
        (Kind.WRONG, [first, second, 3]),
        (Kind.REPEATED, [first, second, first, second, third]),
        (Kind.LOST, [first, third, fourth, fifth]),
    ):
        told.token_ids = spoiled
        assert judge(REQUEST, answered)[0].kind is kind, spoiled
