"""Measures contenders in turn: A B, B A, A B, ... so that a machine that drifts favours none."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def interleave(
    contenders: Mapping[str, Callable[[int], float]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return the samples of each contender, one a round.

    Args:
        contenders: called with the round's number, from 0; they return what they measured. Rounds
            of the warm-up have negative numbers and are not returned.
        rounds: how many count.
        warm_up: how many come before.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(-warm_up, rounds):
        for name in names if number % 2 == 0 else reversed(names):
            sample = contenders[name](number)
            if number >= 0:
                samples[name].append(sample)
    return samples


def ratios(samples: Mapping[str, list[float]], over: str, under: str) -> list[float]:
    """Return `over` / `under` of each round: what both met in one round cancels out."""
    return [a / b for a, b in zip(samples[over], samples[under], strict=True)]
