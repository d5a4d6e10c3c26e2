"""Gumbel-max sampling (Gumbel 1954; Maddison et al. 2014) with counter-based noise.

argmax over tokens of (score + g) with g = -log(-log(u)) is a draw from softmax(score). The noise:

    word = philox(counter = (token >> 2, position, sample index, 0), key = seed)[token & 3]
    u    = ((word >> 8) | 1) * 2^-24          odd 24-bit numerator: exact, never 0 or 1
    g    = -log_f32(-log_f32(u))              from -2.8116 to LARGEST_NOISE

so the token at a position depends on (logits, seed, sample index, position) and on nothing else:
not on the batch, the device, or where the prompt was computed. Equal sums go to the lowest id.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling.logarithm import log_f32
from engine.sampling.philox import philox

LARGEST_NOISE = 16.6356  # -log(-log(1 - 2^-24)) = 16.63553..., rounded up

_CANDIDATES_AT_ONCE = 1 << 13  # the int64 temporaries of so many stay in the second-level cache
_DENSE_SHARE = 8  # judging all tokens costs what the noise of an eighth of them costs


class NoiseKeys(NamedTuple):
    """What the noise of each row is keyed by; all int64 [rows], words of 32 bits."""

    seed_low: Tensor
    seed_high: Tensor
    sample_index: Tensor
    position: Tensor

    def at(self, rows: Tensor | slice) -> NoiseKeys:
        """Return the keys of some rows."""
        return NoiseKeys(*(field[rows] for field in self))


def noise_of(keys: NoiseKeys, token_ids: Tensor) -> Tensor:
    """Return the noise of one token per key, float32 in the shape of `token_ids`."""
    zero = torch.zeros_like(token_ids)
    counter = (token_ids >> 2, keys.position, keys.sample_index, zero)
    words = torch.stack(philox(counter, (keys.seed_low, keys.seed_high)))
    return _gumbel(words.gather(0, (token_ids & 3)[None])[0])


def noise_of_all(keys: NoiseKeys, vocab_size: int) -> Tensor:
    """Return the noise of every token, float32 [rows, vocab_size]."""
    return log_f32(log_f32(_uniform_of_all(keys, vocab_size)).neg_()).neg_()


def _uniform_of_all(keys: NoiseKeys, vocab_size: int) -> Tensor:
    device = keys.position.device
    quads = torch.arange(-(-vocab_size // 4), device=device)[None]
    position, sample = keys.position[:, None], keys.sample_index[:, None]
    key = (keys.seed_low[:, None], keys.seed_high[:, None])
    words = philox((quads, position, sample, torch.zeros_like(quads)), key)
    uniforms = torch.stack([_uniform(word) for word in words], dim=-1)
    return uniforms.flatten(1)[:, :vocab_size]


def _uniform(words: Tensor) -> Tensor:
    return (words >> 8).bitwise_or_(1).to(torch.float32).mul_(2.0**-24)


def _gumbel(words: Tensor) -> Tensor:
    return log_f32(log_f32(_uniform(words)).neg_()).neg_()


def gumbel_argmax(scores: Tensor, keys: NoiseKeys) -> Tensor:
    """Draw one token a row.

    On a CPU only tokens that can still win get their noise in full: the likeliest token with its
    own noise is a floor that the winner reaches. Peaked rows are pruned by the largest noise there
    is, flat ones by each token's uniform. Neither changes a token, as the rest could not have won.
    Elsewhere all get it, which needs no shape from data.

    Args:
        scores: logits over temperature, float32 [rows, vocab_size]; -inf excludes a token.
        keys: of the rows.

    Returns:
        int64 [rows].
    """
    if scores.device.type != "cpu":
        return (scores + noise_of_all(keys, scores.shape[1])).argmax(dim=1)
    best, likeliest = scores.max(dim=1)
    reached = best + noise_of(keys, likeliest)
    # Less what rounding can do on either side of a comparison.
    floor = reached - (best.abs() + LARGEST_NOISE) * 2.0**-20
    possible = scores >= (floor - LARGEST_NOISE)[:, None]
    if int(possible.count_nonzero()) * _DENSE_SHARE > scores.numel():
        rows, tokens = _contenders(scores, keys, floor)
    else:
        rows, tokens = possible.nonzero().unbind(1)
    return _sparse_argmax(scores, keys, rows, tokens)


def _contenders(scores: Tensor, keys: NoiseKeys, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows, tokens) that may reach the floor, judged by their uniforms, without logarithms.

    score - log(-log(u)) >= floor means -log(u) <= exp(score - floor), and 1 - u <= -log(u).
    """
    num_rows, vocab_size = scores.shape
    at_once = max(1, 4 * _CANDIDATES_AT_ONCE // vocab_size)  # four tokens share one Philox
    found: list[Tensor] = []
    for first in range(0, num_rows, at_once):
        part = slice(first, first + at_once)
        missing = _uniform_of_all(keys.at(part), vocab_size).neg_().add_(1.0)
        bound = (scores[part] - floor[part, None]).exp_()
        contenders = (missing <= bound).nonzero()
        contenders[:, 0] += first
        found.append(contenders)
    rows, tokens = torch.cat(found).unbind(1)
    return rows, tokens


def _sparse_argmax(scores: Tensor, keys: NoiseKeys, rows: Tensor, tokens: Tensor) -> Tensor:
    parts = [
        slice(first, first + _CANDIDATES_AT_ONCE)
        for first in range(0, max(1, len(rows)), _CANDIDATES_AT_ONCE)  # none where all are NaN
    ]
    noise = [noise_of(keys.at(rows[part]), tokens[part]) for part in parts]
    sums = scores[rows, tokens].add_(torch.cat(noise))
    best = torch.full((len(scores),), -math.inf).scatter_reduce_(0, rows, sums, "amax")
    winners = (sums == best[rows]).nonzero()[:, 0]
    winner_of_row = torch.full((len(scores),), scores.shape[1])
    winner_of_row.scatter_reduce_(0, rows[winners], tokens[winners], "amin")
    return winner_of_row.clamp_(max=scores.shape[1] - 1)  # of a row of NaN: a token all the same
