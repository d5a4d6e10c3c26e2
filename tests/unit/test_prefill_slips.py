"""What a prefill worker cannot mean is told by its field; what it can mean is not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from core.ids import Attempt, HandoffId, RequestId
from core.messages import FirstTokens, HandoffFailed, HandoffScored
from core.request import EngineRequest, FinishReason, PromptLogprobs, TokenLogprobs
from core.sampling_params import SamplingParams
from decode_pool.prefill_slips import slip_of

HANDOFF = HandoffId(RequestId("r"), Attempt(1, 1))
EOS, NAN = 7, float("nan")
SAMPLING = SamplingParams(
    n=2, max_tokens=5, eos_token_ids=(EOS,), logprobs=1, prompt_logprobs=1, stop_token_ids=(9,)
)
REQUEST = EngineRequest(RequestId("r"), tuple(range(10, 20)), SAMPLING)
FORCED = replace(REQUEST, outputs=((3,), (4,)))
LOGPROBS = TokenLogprobs(-0.5, (3,), (-0.5,))
TOKENS = FirstTokens(
    HANDOFF,
    token_ids=(3, EOS),
    logprobs=(LOGPROBS, LOGPROBS),
    finish_reasons=(None, FinishReason.STOP),
    cached_tokens=10,
    queue_s=0.0,
    prefill_s=0.1,
)
SCORES = PromptLogprobs(3, (-0.1, -0.2), (1, 2), 1, (5, 6), (-0.1, -0.1))


def slip(message: object, request: EngineRequest = REQUEST, next_scored: int = 10) -> str:
    return slip_of(request, message, next_scored=next_scored, vocab_size=100)


def test_what_can_be_is_no_slip() -> None:
    assert slip(TOKENS) == ""
    assert slip(HandoffFailed(HANDOFF, "x")) == ""
    assert slip(replace(TOKENS, token_ids=(3, 200)), FORCED) == "", "they are not taken"
    for start in (1, 2, 3, 8):  # what is known already may be told again
        assert slip(HandoffScored(HANDOFF, replace(SCORES, start=start)), next_scored=8) == ""
    alone = replace(SAMPLING, n=1, logprobs=None, prompt_logprobs=None, max_tokens=1)
    one = replace(TOKENS, token_ids=(99,), logprobs=(), finish_reasons=(FinishReason.LENGTH,))
    assert slip(one, replace(REQUEST, sampling=alone), next_scored=1) == ""
    unknown = replace(TOKENS, token_ids=(3000, EOS))
    assert slip_of(REQUEST, unknown, next_scored=10, vocab_size=None) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cached_tokens": 11}, "cached_tokens = 11"),
        ({"queue_s": NAN}, "queue_s = nan"),
        ({"queue_s": float("inf")}, "queue_s = inf"),
        ({"prefill_s": -1.0}, "prefill_s = -1.0"),
        ({"token_ids": (3,)}, "for n = 2"),
        ({"finish_reasons": (None,)}, "for n = 2"),
        ({"logprobs": ()}, "for n = 2"),
        ({"logprobs": (LOGPROBS, replace(LOGPROBS, chosen=NAN))}, "logprobs: must be numbers"),
        ({"logprobs": (LOGPROBS, replace(LOGPROBS, top=(NAN,)))}, "logprobs: must be numbers"),
        ({"logprobs": (LOGPROBS, replace(LOGPROBS, top=()))}, "one for each of top_ids"),
        ({"token_ids": (100, EOS)}, "token_ids: 100 must be below 100"),
        ({"token_ids": (EOS, EOS)}, "finish_reasons: None after token 7, where it is stop here"),
        ({"token_ids": (3, 4)}, "finish_reasons: stop after token 4, where it is None here"),
        ({"finish_reasons": (FinishReason.LENGTH, FinishReason.STOP)}, "length after token 3"),
    ],
)
def test_first_tokens_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    assert said in slip(replace(TOKENS, **changes))


def test_first_tokens_come_behind_the_scores_and_only_the_logprobs_that_were_asked_for() -> None:
    assert "before the log-probability of prompt token 9" in slip(TOKENS, next_scored=9)
    without = replace(REQUEST, sampling=replace(SAMPLING, logprobs=None))
    assert "for n = 2" in slip(TOKENS, without)
    assert "cached_tokens" in slip(replace(TOKENS, cached_tokens=11), FORCED)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"start": 0}, "tokens 0 to 2, not all of the prompt"),
        ({"start": 9}, "tokens 9 to 11, not all of the prompt"),
        ({"start": 5}, "from token 5 on, where 4 is the next"),
        ({"ranks": (1,)}, "as many as its ranks"),
        ({"num_top": 2}, "as many as its ranks"),
        ({"top_ids": ()}, "as many as its ranks"),
        ({"top": ()}, "as many as its ranks"),
        ({"chosen": (-0.1, NAN)}, "must be numbers"),
        ({"top": (-0.1, NAN)}, "must be numbers"),
    ],
)
def test_scores_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    assert said in slip(HandoffScored(HANDOFF, replace(SCORES, **changes)), next_scored=4)


def test_scores_that_nobody_asked_for() -> None:
    unasked = replace(REQUEST, sampling=replace(SAMPLING, prompt_logprobs=None))
    for request in (unasked, FORCED):
        assert "none were asked" in slip(HandoffScored(HANDOFF, SCORES), request, 4)
