"""The native sampler against torch's: the same tokens, on all instruction sets at hand."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_float, c_int32
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from core.sampling_params import SamplingParams
from engine.kernels.cpu.library import kernel_tables
from engine.sampling import prompt_logprobs
from engine.sampling.gumbel import NoiseKeys, noise_of_all
from tests.native_sampler import Scene, by_kernel, by_torch, is_clear, with_params

Floats = npt.NDArray[np.float32]

tables = pytest.mark.parametrize(
    "table", kernel_tables(), ids=[table.name.decode() for table in kernel_tables()]
)

# Part of a vector, of a block, of the noise computed at once; and vocabularies of real models.
SIZES: Final = (1, 2, 5, 15, 16, 17, 31, 33, 255, 257, 1000, 4099, 49_152)


def logits_of(dice: np.random.Generator, size: int) -> Floats:
    """Return rows of all kinds: flat, peaked, with many equal values, with few possible tokens."""
    logits = dice.standard_normal(size) * dice.choice([0.0, 1e-3, 1.0, 3.0, 10.0])
    if dice.random() < 0.3:
        logits -= 2 * np.log1p(dice.permutation(size))
    if dice.random() < 0.3:
        logits = np.round(logits)
    if dice.random() < 0.2:
        logits[dice.random(size) < 0.9] = -np.inf
    return logits.astype(np.float32)


def plain(dice: np.random.Generator) -> dict[str, Any]:
    return {"temperature": dice.choice([0.1, 0.7, 1.0, 2.0])}


def penalties(dice: np.random.Generator) -> dict[str, Any]:
    return {
        "repetition_penalty": float(dice.choice([1.0, 0.5, 1.3, 1e-39, 1e39])),
        "presence_penalty": float(dice.choice([0.0, 1.5, -2.0])),
        "frequency_penalty": float(dice.choice([0.0, 0.3, -0.7])),
    }


RULES: Final[dict[str, Callable[[np.random.Generator], dict[str, Any]]]] = {
    "greedy": lambda _: {"temperature": 0.0},
    "plain": plain,
    "min_p": lambda dice: plain(dice) | {"min_p": float(dice.choice([1e-40, 0.001, 0.1, 1.0]))},
    "top_k": lambda dice: plain(dice) | {"top_k": int(dice.choice([1, 2, 50, 3500, 30_000]))},
    "top_p": lambda dice: plain(dice) | {"top_p": float(dice.choice([1e-9, 0.3, 0.9, 0.9999]))},
    "penalties": lambda dice: plain(dice) | penalties(dice),
    "greedy penalties": lambda dice: penalties(dice) | {"temperature": 0.0},
    "all": lambda dice: {
        **plain(dice),
        **penalties(dice),
        "min_p": float(dice.choice([0.0, 0.01])),
        "top_k": int(dice.choice([0, 20, 400])),
        "top_p": float(dice.choice([1.0, 0.5, 0.95])),
    },
}


def scene_of(dice: np.random.Generator, size: int, rules: dict[str, Any]) -> Scene:
    num_prompt, num_tokens = sorted(dice.integers(1, 60, 2).tolist())
    return Scene(
        logits=logits_of(dice, size),
        params=SamplingParams(seed=int(dice.integers(2**64, dtype=np.uint64)), **rules),
        tokens=dice.integers(0, min(size, 40), num_tokens).tolist(),
        num_prompt=num_prompt,
        sample_index=int(dice.integers(3)),
        allowed=(dice.random(size) < 0.5) if dice.random() < 0.2 else None,
    )


@pytest.mark.parametrize("rule", RULES)
def test_the_tokens_are_those_of_torch(rule: str) -> None:
    judged = 0
    for seed in range(6):
        for size in SIZES:
            dice = np.random.default_rng([seed, size])
            scene = scene_of(dice, size, RULES[rule](dice))
            if is_clear(scene):
                judged += 1
                expected = by_torch(scene)[0]
                for table in kernel_tables():
                    assert by_kernel(table, scene)[0] == expected, (table.name, size, scene.params)
    assert judged > 5 * len(SIZES)


@tables
@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"min_p": 0.9, "top_k": 40}, 1),  # top_k would keep what min_p drops
        ({"min_p": 1e-3, "top_k": 3}, 3),
        ({"top_k": 3, "top_p": 0.9999}, 3),  # top_p's share is of what top_k keeps
        ({"top_k": 3, "top_p": 0.5}, 2),
        ({"min_p": 0.4, "top_p": 0.999}, 5),
    ],
)
def test_a_filter_judges_what_the_ones_before_it_keep(
    table: Any, rules: dict[str, Any], kept: int
) -> None:
    logits = np.full(600, -1.0, np.float32)
    likeliest = np.array([70, 300, 10, 580, 333])
    logits[likeliest] = [2.0, 1.8, 1.6, 1.4, 1.2]
    drawn = {
        by_kernel(table, Scene(logits, SamplingParams(seed=seed, **rules)))[0] for seed in range(60)
    }
    assert drawn == set(likeliest[:kept].tolist())


@tables
def test_a_large_vocabulary(table: Any) -> None:
    """Of blocks that are twice as wide, and a last one that is not full."""
    dice = np.random.default_rng(5)
    logits = (dice.standard_normal(151_937) * 2).astype(np.float32)
    logits[151_936] = 4.0
    rules: list[dict[str, Any]] = [
        {},
        {"top_k": 40},
        {"top_p": 0.6},
        {"top_k": 9000, "top_p": 0.99},
    ]
    for seed, rule in enumerate(rules):
        scene = Scene(logits, SamplingParams(seed=seed, **rule))
        assert by_kernel(table, scene)[0] == by_torch(scene)[0]
    logits[3] = 99.0
    token, found = by_kernel(table, Scene(logits, SamplingParams(temperature=0.0, logprobs=1)))
    assert token == 3
    assert found is not None
    assert found.chosen == found.top[0] == pytest.approx(0.0)


@tables
def test_the_noise_is_the_same_to_the_last_bit(table: Any) -> None:
    """Where all sums are equal the lowest id wins, and one that is a bit larger wins instead."""
    size, position = 4096, 777
    dice = np.random.default_rng(3)
    for sample_index in range(20):
        seed = int(dice.integers(2**64, dtype=np.uint64))
        words = (seed & 0xFFFFFFFF, seed >> 32, sample_index, position)
        noise = noise_of_all(NoiseKeys(*(torch.tensor([word]) for word in words)), size)[0].numpy()
        logits = -noise  # all sums are 0: none may be pruned, none be larger
        params, tokens = SamplingParams(seed=seed), [0] * position
        scene = Scene(logits, params, tokens, sample_index=sample_index)
        assert by_kernel(table, scene)[0] == 0
        for token in dice.integers(size, size=10).tolist():
            scene.logits[token] = np.nextafter(-noise[token], np.float32(np.inf))
            assert by_kernel(table, scene)[0] == token
            scene.logits[token] = -noise[token]


@tables
def test_the_draws_follow_the_probabilities(table: Any) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    counts = np.zeros(4)
    for seed in range(2000):
        counts[by_kernel(table, Scene(logits, SamplingParams(seed=seed)))[0]] += 1
    np.testing.assert_allclose(counts / 2000, np.exp(logits), atol=0.04)


@tables
@pytest.mark.parametrize("size", SIZES)
def test_the_lowest_of_equal_ids_wins_a_greedy_row(table: Any, size: int) -> None:
    for first in {0, size // 3, size - 1}:
        logits = np.full(size, -3.0, np.float32)
        logits[first::7] = 2.5
        assert by_kernel(table, Scene(logits))[0] == first


@tables
@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_a_row_of_nothing_gives_a_token_all_the_same(table: Any, value: float) -> None:
    rules: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"top_p": 0.5, "logprobs": 3},
    ]
    for size in (1, 40, 2300):
        for rule in rules:
            params = SamplingParams(seed=1, **rule)
            scene = Scene(np.full(size, value, np.float32), params)
            assert by_kernel(table, scene)[0] == by_torch(scene)[0]
            scene.logits[: size // 2] = 0.0
            assert 0 <= by_kernel(table, scene)[0] < size


@tables
def test_nan_is_no_score(table: Any) -> None:
    logits = np.full(300, np.nan, np.float32)
    logits[[70, 200]] = [-1.0, -0.5]
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.01),
    ):
        assert by_kernel(table, Scene(logits, params))[0] == 200


@tables
def test_ids_of_no_token_change_nothing(table: Any) -> None:
    """A history or a stop token of another vocabulary must not write where no logit is."""
    scene = Scene(
        np.zeros(40, np.float32),
        SamplingParams(
            temperature=0.0,
            repetition_penalty=2.0,
            frequency_penalty=1.0,
            logit_bias=((40, 5.0), (-1, 5.0)),
            min_tokens=9,
            stop_token_ids=(40, -1, 10**6),
        ),
        tokens=[0, 40, -1, 10**9],
    )
    assert by_kernel(table, scene)[0] == 0


@tables
@pytest.mark.parametrize("num_top", [0, 1, 5, 300])
def test_log_probabilities_are_of_the_unmodified_logits(table: Any, num_top: int) -> None:
    for seed in range(10):
        dice = np.random.default_rng([seed, num_top])
        logits = (dice.standard_normal(2300) * 4).astype(np.float32)
        rules: dict[str, Any] = {"logit_bias": ((5, 100.0),), "seed": seed}
        scene = Scene(logits, SamplingParams(logprobs=num_top, **rules))
        token, found = by_kernel(table, scene)
        assert token == 5
        expected = by_torch(scene)[1]
        assert found is not None
        assert expected is not None
        assert found.chosen == pytest.approx(expected.chosen, abs=1e-5)
        assert found.top_ids == expected.top_ids
        np.testing.assert_allclose(found.top, expected.top, atol=1e-5)
        assert by_kernel(table, with_params(scene, logprobs=None))[1] is None


@tables
def test_alternatives_of_equal_likelihood_come_by_their_ids(table: Any) -> None:
    logits = np.zeros(90, np.float32)
    logits[[60, 20]] = 1.0
    found = by_kernel(table, Scene(logits, SamplingParams(temperature=0.0, logprobs=5)))[1]
    assert found is not None
    assert found.top_ids == (20, 60, 0, 1, 2)
    every = by_kernel(table, Scene(logits, SamplingParams(temperature=0.0, logprobs=1000)))[1]
    assert every is not None
    assert sorted(every.top_ids) == [*range(90)]


@tables
@pytest.mark.parametrize("size", [1, 20, 2300, 49_152])
def test_prompt_scores_are_those_of_torch(table: Any, size: int) -> None:
    dice = np.random.default_rng(size)
    num_top = min(5, size)
    scratch = np.full(2 * size + 4096, np.nan, np.float32)
    for _ in range(5):
        logits = (dice.standard_normal(size) * 3).astype(np.float32)
        token = int(dice.integers(size))
        expected = prompt_logprobs.score(
            torch.from_numpy(logits)[None], torch.tensor([token]), num_top
        )
        logprob, rank = c_float(), c_int32()
        ids, top = np.zeros(num_top, np.int32), np.zeros(num_top, np.float32)
        before = logits.copy()
        table.score(
            logits.ctypes.data, size, token, num_top, scratch.ctypes.data,
            byref(logprob), byref(rank), ids.ctypes.data, top.ctypes.data,
        )  # fmt: skip
        assert logprob.value == pytest.approx(float(expected.chosen[0]), abs=1e-5)
        assert rank.value == int(expected.ranks[0])
        assert ids.tolist() == expected.top_ids[0].tolist()
        np.testing.assert_allclose(top, expected.top[0].numpy(), atol=1e-5)
        np.testing.assert_array_equal(logits, before)
