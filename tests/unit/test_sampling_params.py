"""core.sampling_params: which tokens end a sample."""

from __future__ import annotations

from core.sampling_params import SamplingParams


def test_eos_and_stop_tokens_end_a_sample() -> None:
    sampling = SamplingParams(stop_token_ids=(7,), eos_token_ids=(1, 2))
    assert [token for token in range(9) if sampling.ends_with(token)] == [1, 2, 7]


def test_ignoring_eos_keeps_the_stop_tokens() -> None:
    sampling = SamplingParams(stop_token_ids=(7, 1), eos_token_ids=(1, 2), ignore_eos=True)
    assert [token for token in range(9) if sampling.ends_with(token)] == [1, 7]
