"""The noise: Philox's published vectors, the logarithm bit for bit, the distribution."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.sampling.gumbel import (
    LARGEST_NOISE,
    NoiseKeys,
    gumbel_argmax,
    noise_of,
    noise_of_all,
)
from engine.sampling.logarithm import log_f32
from engine.sampling.philox import philox

Floats = npt.NDArray[np.float32]

# Known-answer vectors of Random123 1.14 (tests/kat_vectors), philox4x32-10.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    answer = philox((c0, c1, c2, c3), (k0, k1))
    assert " ".join(f"{int(word):08x}" for word in answer) == expected


def reference_log(x: Floats) -> Floats:
    """The documented polynomial in numpy, one rounding an operation."""
    bits = x.view(np.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).view(np.float32) - np.float32(1)
    e = exponent.astype(np.float32)
    square = f * f
    y = f * np.float32(7.0376836292e-2)
    for coefficient in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
                        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1):  # fmt: skip
        y = (y + np.float32(coefficient)) * f
    y = (y + np.float32(3.3333331174e-1)) * f * square
    y = y + e * np.float32(-2.12194440e-4)
    y = y - square * np.float32(0.5)
    return np.asarray((f + y) + e * np.float32(0.693359375), np.float32)


def test_the_logarithm_bit_for_bit_and_its_error() -> None:
    numerators = np.arange(1, 1 << 24, 2 * 101, dtype=np.int32).astype(np.float32)
    uniform = numerators * np.float32(2.0**-24)
    for x in (uniform, -reference_log(uniform)):
        ours = log_f32(torch.from_numpy(x)).numpy()
        np.testing.assert_array_equal(ours.view(np.int32), reference_log(x).view(np.int32))
        exact = np.log(x.astype(np.float64))
        assert np.all(np.abs(ours - exact) <= 2 * np.spacing(np.abs(ours)))


def test_the_noise_stays_within_its_bounds() -> None:
    ends = torch.tensor([2.0**-24, 1 - 2.0**-24])
    low, high = (-log_f32(-log_f32(ends))).tolist()
    assert low == pytest.approx(-2.81154, abs=1e-5)
    assert LARGEST_NOISE - 1e-3 < high < LARGEST_NOISE


def keys(rows: int, *, seed: int = 12345) -> NoiseKeys:
    index = torch.arange(rows)
    return NoiseKeys(torch.full((rows,), seed), index * 0 + 1, index % 3, index + 17)


def test_noise_of_one_token_is_its_entry_in_the_noise_of_all() -> None:
    table = noise_of_all(keys(3), 11)
    for token in range(11):
        tokens = torch.full((3,), token)
        assert torch.equal(noise_of(keys(3), tokens), table[:, token])


def test_every_part_of_the_key_changes_the_noise() -> None:
    base = [5, 6, 1, 9]
    variants = [base, [4, 6, 1, 9], [5, 7, 1, 9], [5, 6, 2, 9], [5, 6, 1, 10]]
    noises = {
        tuple(noise_of_all(NoiseKeys(*(torch.tensor([part]) for part in v)), 8)[0].tolist())
        for v in variants
    }
    assert len(noises) == len(variants)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 12.0])
def test_pruning_changes_no_token(spread: float) -> None:
    """Flat rows take the dense way, peaked ones the pruned one; both are the plain arg-max."""
    scores = torch.randn(6, 4001, generator=torch.Generator().manual_seed(3)) * spread
    scores[:, 100:200] = -torch.inf
    expected = (scores + noise_of_all(keys(6), 4001)).argmax(dim=1)
    assert torch.equal(gumbel_argmax(scores, keys(6)), expected)


def test_equal_sums_go_to_the_lowest_id_and_nan_to_some_token() -> None:
    masked = torch.full((2, 9), -torch.inf)
    masked[0, 5] = 0.0
    masked[1] = torch.nan
    tokens = gumbel_argmax(masked, keys(2))
    assert int(tokens[0]) == 5
    assert 0 <= int(tokens[1]) < 9


def test_the_distribution_is_softmax() -> None:
    """Chi-square over 20,000 positions; 99.9% of right samplers stay under the bound."""
    probabilities = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
    draws = 20_000
    scores = probabilities.log()[None].repeat(draws, 1)
    index = torch.arange(draws)
    tokens = gumbel_argmax(scores, NoiseKeys(index * 0 + 99, index * 0, index * 0, index))
    counts = torch.bincount(tokens, minlength=6).double()
    expected = probabilities.double() * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5  # 5 degrees of freedom
