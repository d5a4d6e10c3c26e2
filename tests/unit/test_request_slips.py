"""core.request_slips: each field that can be wrong is named, with its value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from core.ids import RequestId
from core.request import EngineRequest
from core.request_slips import MAX_SAMPLES, slip_of
from core.sampling_params import SamplingParams


def request(prompt: tuple[int, ...] = (1,), outputs: Any = (), **sampling: Any) -> EngineRequest:
    return EngineRequest(RequestId("r"), prompt, SamplingParams(**sampling), outputs=outputs)


@pytest.mark.parametrize(
    "good",
    [
        request(),
        request(n=2, outputs=((1,), ())),
        request(n=MAX_SAMPLES, temperature=0.0, top_p=0.5, logit_bias=((7, -100.0),)),
        request(bad_words=((1, 2),)),
    ],
)
def test_these_have_none(good: EngineRequest) -> None:
    assert slip_of(good, 0.0) == ""
    assert slip_of(good, math.inf) == ""


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (request(()), "prompt: is empty"),
        (request(n=0), "n = 0: must be from 1"),
        (request(n=MAX_SAMPLES + 1), f"n = {MAX_SAMPLES + 1}: must be from 1"),
        (request(max_tokens=0), "max_tokens = 0: must be at least 1"),
        (request(temperature=math.nan), "temperature = nan: must be a finite"),
        (request(top_p=math.inf), "top_p = inf: must be a finite"),
        (request(logit_bias=((7, math.nan),)), "logit_bias of token 7 = nan"),
        (request(temperature=-1.0), "temperature, repetition_penalty: must"),
        (request(repetition_penalty=0.0), "temperature, repetition_penalty: must"),
        (request(bad_words=((),)), "bad_words: one is empty"),
        (request(n=2, outputs=((1,),)), "outputs: 1 samples; must be none or n = 2"),
    ],
)
def test_the_field_is_named_with_what_would_be_right(bad: EngineRequest, says: str) -> None:
    assert slip_of(bad, 1.0).startswith(says)


def test_time_must_be_a_number() -> None:
    assert slip_of(request(), math.nan) == "remaining_s = nan: must be a number"
