"""What the mock model computes, as pure functions: marks of positions, tokens from them, an oracle.

Each position leaves a 64-bit mark of its token and place. The next token is a hash of the marks of
all positions before it, so that one wrong, missing, stale or misplaced mark changes every token
that follows. The executor reads its marks from the pool's bytes; `expected_tokens` computes them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from core.request import PromptLogprobs, TokenLogprobs
from core.sampling_params import SamplingParams
from engine.token_rules import completing_ids, end_of

_MASK = (1 << 64) - 1
FORCING_BIAS = 100.0
"""A logit_bias from here on forces its token (OpenAI: "values like -100 or 100 should result in a
ban or exclusive selection"); the first such entry wins."""

Marks = npt.NDArray[np.uint64]


def marks_of(token_ids: Sequence[int] | npt.NDArray[np.int64], first_position: int) -> Marks:
    """Return the marks of consecutive positions, uint64 [tokens]; never 0 nor all ones in
    practice."""
    tokens = np.asarray(token_ids, dtype=np.uint64)
    positions = np.arange(first_position, first_position + len(tokens), dtype=np.uint64)
    return _mix(tokens * np.uint64(0x9E3779B97F4A7C15) ^ _mix(positions + np.uint64(1)))


def digest_of(marks: Marks) -> int:
    """Return the sum of the mixed marks, modulo 2**64: every mark counts; quick to extend."""
    return int(_mix(marks).sum(dtype=np.uint64))


def next_token(
    digest: int,
    num_tokens: int,
    sampling: SamplingParams,
    *,
    sample_index: int,
    excluded: Collection[int],
    vocab_size: int,
) -> int:
    """Return the token after `num_tokens` positions with this digest.

    Greedy requests (temperature 0) depend on the prefix alone, others also on (seed, sample index).

    Args:
        excluded: ids that are not drawn, forced ones neither; where these are all, one is drawn
            all the same, as by a sampler whose logits are all -inf.
    """
    for token_id, bias in sampling.logit_bias:
        if bias >= FORCING_BIAS and token_id not in excluded:
            return token_id
    noise = (sampling.seed ^ (sample_index + 1) * 0xD1B54A32D192ED03) if sampling.temperature else 0
    drawn = _mix_int(digest ^ _mix_int((noise + num_tokens) & _MASK)) % vocab_size
    for offset in range(vocab_size):
        token_id = (drawn + offset) % vocab_size
        if token_id not in excluded:
            return token_id
    return drawn


def excluded_tokens(
    sampling: SamplingParams, num_generated: int, *, natural_stops: bool
) -> frozenset[int]:
    """Return the ids that may not be drawn after `num_generated` tokens.

    Banned ones (logit_bias of -100), and EOS and stop tokens: before `min_tokens` always, then only
    a forcing bias brings them, unless `natural_stops`.
    """
    banned = frozenset(t for t, bias in sampling.logit_bias if bias <= -FORCING_BIAS)
    ending = frozenset(sampling.eos_token_ids) | frozenset(sampling.stop_token_ids)
    if num_generated >= sampling.min_tokens:
        forced = frozenset(t for t, bias in sampling.logit_bias if bias >= FORCING_BIAS)
        ending = frozenset[int]() if natural_stops else ending - forced
    return banned | ending


def logprobs_of(token_id: int, sampling: SamplingParams, vocab_size: int) -> TokenLogprobs | None:
    """Return made-up log-probabilities where asked for: the chosen token is the likeliest."""
    if sampling.logprobs is None:
        return None
    top_ids = tuple((token_id + i) % vocab_size for i in range(sampling.logprobs))
    return TokenLogprobs(-0.5, top_ids, tuple(-0.5 * (i + 1) for i in range(sampling.logprobs)))


def prompt_logprobs_of(
    marks: Marks, prompt: Sequence[int], first: int, num_top: int, vocab_size: int
) -> PromptLogprobs:
    """Return made-up log-probabilities of prompt tokens: functions of the marks before each, so
    that a wrong mark shows in all that follow. A token of rank r has -r / 4.

    Args:
        marks: uint64, of all positions before the last token to score.
        first: index in the prompt of the first token to score, at least 1.
    """
    digests = np.cumsum(_mix(marks), dtype=np.uint64)[first - 1 :].tolist()
    chosen: list[float] = []
    ranks: list[int] = []
    top_ids: list[int] = []
    for digest, token_id in zip(digests, prompt[first:], strict=False):
        rank = 1 + _mix_int(digest ^ token_id) % 8
        chosen.append(-0.25 * rank)
        ranks.append(rank)
        top_ids += [
            token_id if place == rank else (token_id + 8 * place + digest) % vocab_size
            for place in range(1, num_top + 1)
        ]
    top = tuple(-0.25 * place for place in range(1, num_top + 1)) * len(chosen)
    return PromptLogprobs(first, tuple(chosen), tuple(ranks), num_top, tuple(top_ids), top)


def expected_tokens(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    sample_index: int = 0,
    outputs: Sequence[int] = (),
    natural_stops: bool = False,
) -> tuple[int, ...]:
    """The oracle: all generated tokens of one sample, the ending one included.

    Args:
        prompt: token ids.
        sampling: its `max_tokens`, EOS, stop tokens and `min_tokens` end the sample.
        outputs: tokens that are given already (forced); they head the result.
        natural_stops: as the executor's.
    """
    generated = list(outputs)
    num_tokens = len(prompt) + len(generated)
    digest = digest_of(marks_of([*prompt, *generated], 0))
    while end_of(generated, sampling) is None:
        excluded = excluded_tokens(sampling, len(generated), natural_stops=natural_stops)
        excluded |= completing_ids(sampling.bad_words, generated)
        token_id = next_token(
            digest,
            num_tokens,
            sampling,
            sample_index=sample_index,
            excluded=excluded,
            vocab_size=vocab_size,
        )
        generated.append(token_id)
        digest = (digest + digest_of(marks_of([token_id], num_tokens))) & _MASK
        num_tokens += 1
    return tuple(generated)


def _mix(values: Marks) -> Marks:
    """Return splitmix64's finalizer (Steele, Lea, Flood 2014) of each value, wrapping."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _mix_int(value: int) -> int:
    """Return the same of one Python integer."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
