"""The scheduler's small pure parts: token rules, chunks, forecast, speeds."""

from __future__ import annotations

import pytest

from core.ids import SlotId
from core.request import FinishReason
from core.sampling_params import SamplingParams
from engine.executor.interface import SlotWork, StepPlan
from engine.scheduling.chunking import chunk_length
from engine.scheduling.forecast import PRIOR_TOKENS, Growth, LengthHistory, peak_tokens
from engine.speed import StepSpeeds
from engine.token_rules import accept, end_of

SAMPLING = SamplingParams(max_tokens=4, min_tokens=1, eos_token_ids=(7,), stop_token_ids=(8,))


@pytest.mark.parametrize(
    ("token_ids", "before", "expected"),
    [
        ((1, 2), 0, (2, None)),
        ((7, 2), 0, (2, None)),  # before min_tokens EOS is a token like any other
        ((1, 7, 2), 0, (2, FinishReason.STOP)),
        ((8,), 3, (1, FinishReason.STOP)),  # a stop wins over the length
        ((1, 2, 3), 2, (2, FinishReason.LENGTH)),
        ((), 3, (0, None)),
    ],
)
def test_accepted_tokens_end_with_the_one_that_ends_the_sample(
    token_ids: tuple[int, ...], before: int, expected: tuple[int, FinishReason | None]
) -> None:
    assert accept(token_ids, before, SAMPLING) == expected


def test_outputs_that_are_given_may_have_ended() -> None:
    assert end_of((), SAMPLING) is None
    assert end_of((1, 7), SAMPLING) is FinishReason.STOP
    assert end_of((1, 2, 3), SAMPLING) is None


@pytest.mark.parametrize(
    ("start", "remaining", "budget", "expected"),
    [(0, 50, 64, 50), (0, 50, 40, 32), (32, 18, 16, 16), (5, 60, 16, 11), (5, 60, 10, 0)],
)
def test_chunks_reach_the_end_or_a_border(
    start: int, remaining: int, budget: int, expected: int
) -> None:
    assert chunk_length(start, remaining, budget, 16) == expected


def test_the_peak_is_where_one_finishes_and_not_the_sum_of_all_lengths() -> None:
    assert peak_tokens([]) == 0
    # The short one gives its memory back before the long one grows into it.
    assert peak_tokens([Growth(100, 10), Growth(10, 90)]) == max(10 + 90, 110 + 2 * 10)


def test_before_any_sample_has_finished_each_is_taken_to_reach_256_tokens() -> None:
    history = LengthHistory()
    assert history.remaining(0, 100_000) == PRIOR_TOKENS == 256
    assert history.remaining(100, 100_000) == 156
    assert history.remaining(200, 100_000) == 200  # and then to double
    assert history.remaining(0, 20) == 20  # but never beyond its max_tokens
    assert history.remaining(200, 210) == 10
    history.record(8)
    assert history.remaining(0, 100_000) == 8


def test_lengths_are_forecast_from_those_that_lasted_longer() -> None:
    history = LengthHistory(window=4, quantile=0.5, prior=64)
    assert history.remaining(0, 1000) == 64
    assert history.remaining(0, 10) == 10
    assert history.remaining(100, 1000) == 100
    for length in (10, 20, 30, 40, 50):  # the window forgets 10
        history.record(length)
    assert history.remaining(0, 1000) == 30
    assert history.remaining(35, 1000) == 5
    assert history.remaining(60, 1000) == 60
    assert history.remaining(60, 60) == 0


def test_speeds_are_smoothed_and_small_chunks_say_nothing() -> None:
    speeds = StepSpeeds(weight=0.5)
    slot = SlotId(0)
    speeds.measured(StepPlan(0, work=(SlotWork(slot, 8, 0),)), 1.0)
    assert (speeds.prefill_tokens_per_s, speeds.decode_step_s) == (None, None)
    speeds.measured(StepPlan(1, work=(SlotWork(slot, 100, 1),)), 0.5)
    speeds.measured(StepPlan(2, work=(SlotWork(slot, 1, 1),)), 0.1)
    speeds.measured(StepPlan(3, work=(SlotWork(slot, 1, 1),)), 0.2)
    assert speeds.prefill_tokens_per_s == 200
    assert speeds.decode_step_s == pytest.approx(0.15)
