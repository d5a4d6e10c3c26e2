"""Logits -> one token a row, by vLLM's order of rules.

     1  log-probabilities, where asked for, of the unmodified logits
     2  allowed-token mask, bad words    others, and what would complete one, -inf
     3  min_tokens                       EOS and stop tokens -inf until enough were generated
     4  logit_bias                       added
     5  penalties                        repetition, then frequency and presence
     6  temperature 0                    arg-max, the lowest id among equals; done
     7  temperature                      times float32(1 / temperature)
     8  min_p, then top_k, then top_p
     9  Gumbel-max                       noise keyed by (seed, sample index, position, token id)

Each rule runs on the rows that ask for it and on no others. A row's token depends on its own row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from core.sampling_params import SamplingParams
from engine.kernels.host_device import floats_on, integers_on
from engine.sampling import logprobs
from engine.sampling.filters import min_p_filter, top_k_filter, top_p_filter
from engine.sampling.gumbel import NoiseKeys, gumbel_argmax
from engine.sampling.logprobs import PendingLogprobs
from engine.sampling.penalties import History, PenaltyFactors, apply_penalties
from engine.sampling.slot_sampling import BadWords, SlotSampling

_WORD = 0xFFFFFFFF


class SampleRow(NamedTuple):
    """One row to sample from.

    Attributes:
        sample_index: which of the request's n samples; keys the noise.
        allowed: bool [vocab_size], or None for no mask.
    """

    sampling: SlotSampling
    sample_index: int
    allowed: Tensor | None = None


class Sequences(NamedTuple):
    """Where the rows' tokens so far are.

    Attributes:
        token_ids: int64 [slots, capacity].
        slots: int64 [rows].
        num_prompt: int64 [rows].
        positions: int64 [rows], index in the sequence of the token to sample = tokens so far.
        longest: an upper bound of `positions`, known to the host.
    """

    token_ids: Tensor
    slots: Tensor
    num_prompt: Tensor
    positions: Tensor
    longest: int


class Sampled(NamedTuple):
    """Results, still on the device: int64 [rows], and log-probabilities where asked for."""

    token_ids: Tensor
    logprobs: PendingLogprobs | None


def sample(logits: Tensor, rows: Sequence[SampleRow], sequences: Sequences) -> Sampled:
    """Draw one token a row.

    Args:
        logits: float32 [rows, vocab_size]; overwritten.
        rows: what each row wants.
        sequences: the tokens so far.
    """
    asking = _where(rows, lambda p: p.logprobs is not None)
    table = logprobs.log_probabilities(logits, asking) if asking else None
    _restrict(logits, rows, sequences)
    _penalize(logits, rows, sequences)
    token_ids = _choose(logits, rows, sequences.positions)
    if table is None:
        return Sampled(token_ids, None)
    num_top = [rows[row].sampling.params.logprobs or 0 for row in asking]
    return Sampled(token_ids, logprobs.pick(table, asking, num_top, token_ids))


def _where(rows: Sequence[SampleRow], wanted: Callable[[SamplingParams], bool]) -> list[int]:
    return [index for index, row in enumerate(rows) if wanted(row.sampling.params)]


def _restrict(logits: Tensor, rows: Sequence[SampleRow], sequences: Sequences) -> None:
    """Rules 2 to 4, row by row: few rows have any of them."""
    for index, (sampling, _, allowed) in enumerate(rows):
        if allowed is not None:
            logits[index].masked_fill_(~allowed, -math.inf)
        if sampling.bad_words is not None:
            _ban_completions(logits[index], sampling.bad_words, sequences, index)
        if sampling.ending_ids is not None:
            generated = sequences.positions[index] - sequences.num_prompt[index]
            too_early = generated < sampling.params.min_tokens
            ending = logits[index][sampling.ending_ids]
            logits[index, sampling.ending_ids] = ending.masked_fill(too_early, -math.inf)
        if sampling.bias_ids is not None and sampling.bias is not None:
            logits[index].index_add_(0, sampling.bias_ids, sampling.bias)


def _ban_completions(scores: Tensor, words: BadWords, sequences: Sequences, row: int) -> None:
    """Mask, in place, the last token of each word whose others the generated tokens end with."""
    position = sequences.positions[row]
    longest = words.prefixes.shape[1]
    at = position - longest + torch.arange(longest, device=scores.device)
    slot = sequences.slots[row : row + 1]  # a scalar as an index would be read on the host
    tokens = sequences.token_ids[slot, at.clamp_(min=0)]
    is_next = ((tokens == words.prefixes) | words.padding).all(dim=1)
    is_next &= words.num_prefix <= position - sequences.num_prompt[row]
    masked = torch.zeros(len(words.last), device=scores.device).masked_fill_(is_next, -math.inf)
    scores.index_add_(0, words.last, masked)  # several words may end alike


def _penalize(logits: Tensor, rows: Sequence[SampleRow], sequences: Sequences) -> None:
    penalized = [index for index, row in enumerate(rows) if row.sampling.penalized]
    if not penalized:
        return
    device = logits.device
    at = integers_on(device, penalized)
    params = [rows[index].sampling.params for index in penalized]
    history = History(
        sequences.token_ids[sequences.slots[at], : sequences.longest],
        sequences.positions[at],
        sequences.num_prompt[at],
    )
    factors = PenaltyFactors(
        floats_on(device, [p.repetition_penalty for p in params]),
        floats_on(device, [p.presence_penalty for p in params]),
        floats_on(device, [p.frequency_penalty for p in params]),
    )
    changed = logits[at]
    apply_penalties(changed, history, factors)
    logits[at] = changed


def _choose(logits: Tensor, rows: Sequence[SampleRow], positions: Tensor) -> Tensor:
    drawn = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    if not drawn:
        return logits.argmax(dim=1)
    if len(drawn) == len(rows):
        return _draw(logits, rows, positions)
    at = integers_on(logits.device, drawn)
    token_ids = logits.argmax(dim=1)
    token_ids[at] = _draw(logits[at], [rows[index] for index in drawn], positions[at])
    return token_ids


def _draw(logits: Tensor, rows: Sequence[SampleRow], positions: Tensor) -> Tensor:
    device = logits.device
    inverse = floats_on(device, [row.sampling.inverse_temperature for row in rows])
    scores = logits.mul_(inverse[:, None])
    _filter(scores, [row.sampling.params for row in rows])
    seeds = [row.sampling.params.seed for row in rows]
    keys = NoiseKeys(
        integers_on(device, [seed & _WORD for seed in seeds]),
        integers_on(device, [seed >> 32 & _WORD for seed in seeds]),
        integers_on(device, [row.sample_index for row in rows]),
        positions,
    )
    return gumbel_argmax(scores, keys)


def _filter(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Rule 8 on the rows that have it."""
    vocab_size, device = scores.shape[1], scores.device
    if with_min_p := [i for i, p in enumerate(params) if p.min_p > 0]:
        at = integers_on(device, with_min_p)
        part = scores[at]
        min_p_filter(part, floats_on(device, [params[i].min_p for i in with_min_p]))
        scores[at] = part
    if with_top_k := [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]:
        at = integers_on(device, with_top_k)
        part = scores[at]
        counts = [params[i].top_k for i in with_top_k]
        top_k_filter(part, integers_on(device, counts), max(counts))
        scores[at] = part
    if with_top_p := [i for i, p in enumerate(params) if p.top_p < 1]:
        at = integers_on(device, with_top_p)
        part = scores[at]
        top_p_filter(part, floats_on(device, [params[i].top_p for i in with_top_p]))
        scores[at] = part
