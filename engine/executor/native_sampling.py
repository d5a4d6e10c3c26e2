"""What the native sampler is told of each row, and what it tells back; no torch.

A sequence's parameters become a `DrawItem` once; the library copies it for each draw and adds what
moves. What it cannot know, such as the ids that may not come next, is added to the copies here.
Structs hold addresses: who makes them keeps the arrays behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.request import PromptLogprobs, TokenLogprobs
from core.sampling_params import SamplingParams
from engine.kernels.cpu.abi import DrawItem, SampleRow, ScoreItem
from engine.token_rules import completing_ids

Integers = NDArray[np.int32]
Floats = NDArray[np.float32]

_LEAST_INVERSE: Final = 2.0**-126
"""Of temperatures beyond float32: 0 would mean greedy."""


class NativeSampling(NamedTuple):
    """What the sampler reads of one sequence each step.

    Attributes:
        row: the parameters, without what moves.
        ending_ids: banned until `min_tokens` were generated.
        longest_word: tokens of the longest bad word; 0 where there are none.
        bias_ids, bias: what `row` points to.
    """

    params: SamplingParams
    vocab_size: int
    row: SampleRow
    ending_ids: frozenset[int]
    longest_word: int
    bias_ids: Integers
    bias: Floats


class SampledSequence:
    """What every draw of one sequence has in common, made once.

    Args:
        tokens: int32, contiguous, the tokens so far and room for more; read when a draw is made and
            drawn.
        num_prompt: how many of them are prompt.
        sample_index: which of the request's n samples; keys the noise.

    Attributes:
        item: a `DrawItem`, without what moves.
        is_plain: no ids are ever banned, and no log-probabilities wanted.
    """

    def __init__(
        self, sampling: NativeSampling, tokens: Integers, num_prompt: int, sample_index: int = 0
    ) -> None:
        assert tokens.dtype == np.int32
        self.sampling = sampling
        self.tokens = tokens
        self.num_prompt = num_prompt
        self.item = item = DrawItem(sampling=sampling.row)
        item.sampling.history = address_of(tokens)
        item.sampling.num_prompt = num_prompt
        item.sampling.sample_index = sample_index
        self.num_logprobs = sampling.row.num_logprobs
        is_banning = bool(sampling.ending_ids) or sampling.longest_word > 0
        self.is_plain = not is_banning and self.num_logprobs < 0


class Wish(NamedTuple):
    """A draw that asks for more than its slot's parameters say.

    Attributes:
        draw: its number among the step's.
        num_tokens: so far: prompt, outputs, and drafts before this one.
        allowed: bool [vocab_size], or None for no mask.
    """

    draw: int
    sequence: SampledSequence
    num_tokens: int
    allowed: Any = None


def resolve(params: SamplingParams, vocab_size: int) -> NativeSampling:
    """Precompute what does not change from step to step.

    Ids outside the vocabulary can neither be drawn nor kept from it, and are left out.
    """
    bias = {token: value for token, value in params.logit_bias if 0 <= token < vocab_size}
    bias_ids, biases = np.array([*bias], np.int32), np.array([*bias.values()], np.float32)
    row = SampleRow(
        seed=params.seed,
        inverse_temperature=0.0 if params.is_greedy else _inverse(params.temperature),
        min_p=params.min_p,
        top_p=params.top_p,
        top_k=params.top_k if params.top_k < vocab_size else 0,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_ids=address_of(bias_ids),
        bias=address_of(biases),
        num_bias=len(bias),
        num_logprobs=-1 if params.logprobs is None else min(params.logprobs, vocab_size),
    )
    # EOS is masked even where it ends nothing, as in vLLM: min_tokens promises text.
    ending = frozenset(params.stop_token_ids) | frozenset(params.eos_token_ids)
    return NativeSampling(
        params=params,
        vocab_size=vocab_size,
        row=row,
        ending_ids=ending if params.min_tokens > 0 else frozenset(),
        longest_word=max(map(len, params.bad_words), default=0),
        bias_ids=bias_ids,
        bias=biases,
    )


def _inverse(temperature: float) -> float:
    return max(1.0 / temperature, _LEAST_INVERSE)


class Wishes:
    """What some draws of a step ask for.

    Args:
        items: the step's draws, `DrawItem`s, which are told; they must not be drawn any more once
            this is gone.
        wishes: by draw, ascending. Their sequences' arrays must not change until the library has
            drawn.
    """

    def __init__(self, items: Any, wishes: Sequence[Wish]) -> None:
        counts = {wish.draw: wish.sequence.num_logprobs for wish in wishes}
        self._counts = {draw: count for draw, count in counts.items() if count >= 0}
        num_tops = sum(self._counts.values())
        self._chosen = np.zeros(len(self._counts), np.float32)
        self._top_ids = np.zeros(num_tops, np.int32)
        self._top = np.zeros(num_tops, np.float32)
        self._kept: list[object] = [wishes]
        for wish in wishes:
            self._constrain(items[wish.draw].sampling, wish)
        first = 0
        for index, (draw, count) in enumerate(self._counts.items()):
            item = items[draw]
            item.chosen = address_of(self._chosen) + 4 * index
            item.top_ids = address_of(self._top_ids) + 4 * first
            item.top = address_of(self._top) + 4 * first
            first += count

    def _constrain(self, row: SampleRow, wish: Wish) -> None:
        banned = _banned(wish)
        if banned:
            ids = np.array([*banned], np.int32)
            row.banned, row.num_banned = address_of(ids), len(ids)
            self._kept.append(ids)
        if wish.allowed is not None:
            mask = _mask(wish.allowed, wish.sequence.sampling.vocab_size)
            row.allowed = address_of(mask)
            self._kept.append(mask)

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities of the draws that ask for them, once they are drawn."""
        chosen: list[float] = self._chosen.tolist()
        top_ids: list[int] = self._top_ids.tolist()
        top: list[float] = self._top.tolist()
        results: dict[int, TokenLogprobs] = {}
        first = 0
        for value, (draw, count) in zip(chosen, self._counts.items(), strict=True):
            own = slice(first, first + count)
            results[draw] = TokenLogprobs(value, tuple(top_ids[own]), tuple(top[own]))
            first += count
        return results


def _banned(wish: Wish) -> frozenset[int]:
    """Return the ids that may not come next: min_tokens' and the last ones of bad words."""
    sequence, num_tokens = wish.sequence, wish.num_tokens
    sampling, num_prompt = sequence.sampling, sequence.num_prompt
    banned: frozenset[int] = frozenset()
    if num_tokens - num_prompt < sampling.params.min_tokens:
        banned = sampling.ending_ids
    if sampling.longest_word:
        first = max(num_prompt, num_tokens + 1 - sampling.longest_word)
        recent: list[int] = sequence.tokens[first:num_tokens].tolist()
        banned |= completing_ids(sampling.params.bad_words, recent)
    return banned


def _mask(allowed: Any, vocab_size: int) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = np.ascontiguousarray(allowed, dtype=np.bool_)
    if mask.shape != (vocab_size,):
        msg = f"a mask of allowed tokens has shape {mask.shape}: must be ({vocab_size},)"
        raise ValueError(msg)
    return mask


class PromptRun(NamedTuple):
    """Prompt tokens to score, one a row.

    Attributes:
        first_row: the step's row before the first of them.
        start: index in the prompt of the first of them, at least 1.
        tokens: int32 [tokens], contiguous.
        num_top: alternatives.
    """

    first_row: int
    start: int
    tokens: Integers
    num_top: int


class PromptScores:
    """The prompt log-probabilities of one step.

    Args:
        runs: what to score, in the order of `items`. Their arrays must not change until the step
            has run.
        vocab_size: no row has more alternatives.

    Attributes:
        items: for the library, which writes the scores.
    """

    def __init__(self, runs: Sequence[PromptRun], vocab_size: int) -> None:
        self._runs = [run._replace(num_top=min(run.num_top, vocab_size)) for run in runs]
        self._outputs = [
            (
                np.zeros(len(run.tokens), np.float32),
                np.zeros(len(run.tokens), np.int32),
                np.zeros(len(run.tokens) * run.num_top, np.int32),
                np.zeros(len(run.tokens) * run.num_top, np.float32),
            )
            for run in self._runs
        ]
        self.items: Any = (ScoreItem * len(runs))()
        for index, (run, outputs) in enumerate(zip(self._runs, self._outputs, strict=True)):
            item = self.items[index]
            item.first_row, item.num_rows, item.num_top = (
                run.first_row,
                len(run.tokens),
                run.num_top,
            )
            assert run.tokens.dtype == np.int32
            item.tokens = address_of(run.tokens)
            item.logprobs, item.ranks, item.top_ids, item.top = map(address_of, outputs)

    def results(self) -> list[PromptLogprobs]:
        """Return the scores of each run."""
        return [
            PromptLogprobs(
                start=run.start,
                chosen=tuple(chosen.tolist()),
                ranks=tuple(ranks.tolist()),
                num_top=run.num_top,
                top_ids=tuple(top_ids.tolist()),
                top=tuple(top.tolist()),
            )
            for run, (chosen, ranks, top_ids, top) in zip(self._runs, self._outputs, strict=True)
        ]


def address_of(array: NDArray[Any]) -> int:
    """Return where a contiguous array stands; who passes it on keeps the array."""
    assert array.flags.c_contiguous
    address, _ = array.__array_interface__["data"]
    return address
