"""From sampling parameters to the native sampler's rows, and from its outputs back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.request import PromptLogprobs, TokenLogprobs
from core.sampling_params import SamplingParams
from engine.executor.native_sampling import (
    PromptRun,
    PromptScores,
    SampledSequence,
    Wish,
    Wishes,
    resolve,
)
from engine.kernels.cpu.library import kernel_tables
from tests.native_sampler import Scene, by_kernel, by_torch, drawn_from

VOCAB = 50
PROMPT, OUTPUT = [3, 5, 5, 8], [5, 11, 11, 20]
TOKENS = np.array(PROMPT + OUTPUT, np.int32)


def row_of(tokens: Any = TOKENS, allowed: Any = None, **rules: Any) -> tuple[Wishes, Any]:
    """Return one draw's wishes, and its row; the first keeps what the second points to."""
    sampling = resolve(SamplingParams(**rules), VOCAB)
    sequence = SampledSequence(sampling, tokens, len(PROMPT), sample_index=2)
    (item,), wishes = drawn_from([Wish(0, sequence, len(tokens), allowed)])
    return wishes, item.sampling


def integers_at(address: int | None, count: int) -> list[int]:
    if not count:
        return []
    assert address is not None
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address)).tolist()


def banned(**rules: Any) -> set[int]:
    wishes, row = row_of(temperature=0.0, **rules)
    ids = integers_at(row.banned, row.num_banned)
    del wishes  # kept until here
    return set(ids)


def test_what_moves_comes_from_the_draw() -> None:
    wishes, row = row_of(seed=2**64 - 1, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)
    assert (row.seed, row.inverse_temperature, row.top_k) == (2**64 - 1, 2.0, 7)
    assert (row.top_p, row.min_p, row.sample_index) == (0.25, 0.125, 2)
    assert (row.position, row.num_history, row.num_prompt) == (8, 8, 4)
    assert integers_at(row.history, 8) == PROMPT + OUTPUT
    assert (row.num_logprobs, row.num_banned, row.num_bias, row.allowed) == (-1, 0, 0, None)
    assert wishes.logprobs() == {}


@pytest.mark.parametrize(
    ("temperature", "inverse"),
    [(0.0, 0.0), (9e-6, 0.0), (1e-5, 1e5), (2.0, 0.5), (1e300, 2.0**-126)],
)
def test_only_temperatures_near_0_are_greedy(temperature: float, inverse: float) -> None:
    assert row_of(temperature=temperature)[1].inverse_temperature == pytest.approx(inverse)


def test_a_top_k_of_the_whole_vocabulary_is_none() -> None:
    assert row_of(top_k=VOCAB)[1].top_k == 0
    assert row_of(top_k=VOCAB - 1)[1].top_k == VOCAB - 1


def test_a_token_has_one_bias_and_none_outside_the_vocabulary() -> None:
    wishes, row = row_of(logit_bias=((7, 1.0), (VOCAB, 9.0), (-1, 9.0), (7, 2.0), (8, -3.0)))
    assert integers_at(row.bias_ids, row.num_bias) == [7, 8]
    del wishes  # kept until here


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"min_tokens": 5, "stop_token_ids": (2,), "eos_token_ids": (1,)}, {1, 2}),
        ({"min_tokens": 5, "eos_token_ids": (1,), "ignore_eos": True}, {1}),
        ({"min_tokens": 4, "stop_token_ids": (2,), "eos_token_ids": (1,)}, set[int]()),
        ({"bad_words": ((40,), (20, 41), (11, 20, 42))}, {40, 41, 42}),
        ({"bad_words": ((*OUTPUT, 41),)}, {41}),
        ({"bad_words": ((PROMPT[-1], *OUTPUT, 41), (11, 41), (1,) * 30)}, set[int]()),
        ({"bad_words": ((40,),), "min_tokens": 9, "stop_token_ids": (2,)}, {2, 40}),
    ],
)
def test_the_ids_that_may_not_come_next(rules: dict[str, Any], expected: set[int]) -> None:
    assert banned(**rules) == expected


def test_bad_words_before_anything_was_generated() -> None:
    wishes, row = row_of(np.array(PROMPT, np.int32), bad_words=((40,), (PROMPT[-1], 41)))
    assert integers_at(row.banned, row.num_banned) == [40]
    assert row.position == 4
    del wishes  # kept until here


def test_a_mask_must_cover_the_vocabulary() -> None:
    row_of(allowed=[True] * VOCAB)
    with pytest.raises(ValueError, match=r"shape \(49,\): must be \(50,\)"):
        row_of(allowed=[True] * (VOCAB - 1))


@pytest.mark.parametrize("seed", range(8))
def test_the_rules_together_choose_the_token_that_torch_chooses(seed: int) -> None:
    dice = np.random.default_rng(seed)
    for temperature in (0.0, 0.8):
        scene = Scene(
            logits=np.round(dice.standard_normal(VOCAB) * 2).astype(np.float32),
            params=SamplingParams(
                seed=seed,
                temperature=temperature,
                min_tokens=int(dice.integers(3, 6)),
                eos_token_ids=(1,),
                stop_token_ids=tuple(dice.integers(0, VOCAB, 4).tolist()),
                bad_words=tuple(
                    tuple(dice.choice([5, 11, 20, 7], size=dice.integers(1, 4)).tolist())
                    for _ in range(5)
                ),
                logit_bias=tuple((int(token), 2.0) for token in dice.integers(0, VOCAB, 5)),
                repetition_penalty=1.2,
                presence_penalty=0.5,
                top_k=int(dice.choice([0, 10])),
            ),
            tokens=PROMPT + OUTPUT,
            num_prompt=len(PROMPT),
            allowed=dice.random(VOCAB) < 0.7,
        )
        for table in kernel_tables():
            assert by_kernel(table, scene)[0] == by_torch(scene)[0]


def fill(address: int | None, values: Sequence[float], kind: Any) -> None:
    """Write as the library would."""
    assert address is not None
    memory = (kind * len(values)).from_address(address)
    memory[:] = values


def test_log_probabilities_come_back_to_their_draws() -> None:
    wants = (2, None, 0, 1000, 1)
    samplings = [resolve(SamplingParams(logprobs=n), 4) for n in wants]
    sequences = [SampledSequence(one, TOKENS, 4) for one in samplings]
    items, wishes = drawn_from([Wish(draw, one, 8) for draw, one in enumerate(sequences)])
    assert [item.sampling.num_logprobs for item in items] == [2, -1, 0, 4, 1]
    for index, item in enumerate(items):
        count = item.sampling.num_logprobs
        if count < 0:
            assert item.chosen is item.top is item.top_ids is None
            continue
        fill(item.chosen, [-index], ctypes.c_float)
        if count:
            fill(item.top_ids, [index + 10 * i for i in range(count)], ctypes.c_int32)
            fill(item.top, [-index - 10 * i for i in range(count)], ctypes.c_float)
    assert wishes.logprobs() == {
        0: TokenLogprobs(0.0, (0, 10), (0.0, -10.0)),
        2: TokenLogprobs(-2.0),
        3: TokenLogprobs(-3.0, (3, 13, 23, 33), (-3.0, -13.0, -23.0, -33.0)),
        4: TokenLogprobs(-4.0, (4,), (-4.0,)),
    }


def test_prompt_scores_come_back_to_their_runs() -> None:
    scores = PromptScores([PromptRun(4, 1, TOKENS[1:3], 2), PromptRun(9, 7, TOKENS[7:], 99)], 3)
    for item in scores.items:
        count = item.num_rows
        fill(item.logprobs, [-1.0 * item.first_row] * count, ctypes.c_float)
        fill(item.ranks, integers_at(item.tokens, count), ctypes.c_int32)
        fill(item.top_ids, list(range(count * item.num_top)), ctypes.c_int32)
        fill(item.top, [-2.0] * count * item.num_top, ctypes.c_float)
    assert scores.results() == [
        PromptLogprobs(1, (-4.0, -4.0), (5, 5), 2, (0, 1, 2, 3), (-2.0,) * 4),
        PromptLogprobs(7, (-9.0,), (20,), 3, (0, 1, 2), (-2.0,) * 3),
    ]
