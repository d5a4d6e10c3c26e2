"""How a request wants its tokens chosen. Token rules only: stop strings belong to the router."""

from __future__ import annotations

import msgspec

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy, as in vLLM."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampler's inputs, under vLLM's names.

    `seed` is always set by the time a worker sees it: the router draws missing seeds, so that a
    request's tokens are a function of its own fields wherever it runs.

    Attributes:
        n: samples of one prompt; sample i draws noise keyed by (seed, i).
        max_tokens: upper bound on generated tokens, at least 1.
        min_tokens: EOS and stop tokens are masked until so many were generated.
        temperature: 0 means greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches p.
        min_p: keep tokens of at least min_p times the largest probability.
        repetition_penalty: over prompt and output tokens (CTRL, Keskar et al. 2019, section 4.1).
        presence_penalty: over output tokens, OpenAI's definition.
        frequency_penalty: over output tokens, OpenAI's definition.
        logit_bias: (token id, bias) pairs, added before the filters.
        bad_words: token sequences that are never completed: the last token of one is masked where
            the generated tokens end with those before it.
        stop_token_ids: end generation like EOS, also when `ignore_eos` is set.
        eos_token_ids: the model's, resolved by the router.
        ignore_eos: EOS ends nothing.
        logprobs: number of top alternatives to return; 0 returns the chosen token's alone, None
            nothing.
        prompt_logprobs: likewise for each prompt token; None leaves the prompt unscored.
        seed: 64 unsigned bits.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken and no noise drawn."""
        return self.temperature < GREEDY_BELOW

    def ends_with(self, token_id: int) -> bool:
        """Whether an id ends a sample: a stop token, or EOS unless ignored."""
        is_eos = not self.ignore_eos and token_id in self.eos_token_ids
        return is_eos or token_id in self.stop_token_ids
