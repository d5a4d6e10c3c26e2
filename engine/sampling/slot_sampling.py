"""A request's sampling parameters, resolved once when its sequence enters the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from core.sampling_params import SamplingParams
from engine.kernels.host_device import floats_on, integers_on, to_device


class BadWords(NamedTuple):
    """Token sequences that may not be completed, one a row.

    Attributes:
        prefixes: int64 [words, longest], all but the last token, aligned to the right.
        padding: bool [words, longest], True left of a prefix.
        num_prefix: int64 [words].
        last: int64 [words].
    """

    prefixes: Tensor
    padding: Tensor
    num_prefix: Tensor
    last: Tensor


class SlotSampling(NamedTuple):
    """What the sampler reads of one sequence each step.

    Attributes:
        inverse_temperature: 1 / temperature; 0 where greedy.
        ending_ids: int64, masked until `min_tokens` were generated; None where nothing is.
        bias_ids: int64; None where there is no bias.
        bias: float32, one an id.
        bad_words: None where there are none.
    """

    params: SamplingParams
    greedy: bool
    inverse_temperature: float
    penalized: bool
    ending_ids: Tensor | None
    bias_ids: Tensor | None
    bias: Tensor | None
    bad_words: BadWords | None


def resolve(params: SamplingParams, device: torch.device) -> SlotSampling:
    """Precompute what does not change from step to step."""
    greedy = params.is_greedy
    # EOS is masked even where it ends nothing, as in vLLM: min_tokens promises text.
    ending = frozenset(params.stop_token_ids) | frozenset(params.eos_token_ids)
    needs_ending = params.min_tokens > 0 and bool(ending)
    bias = dict(params.logit_bias)
    return SlotSampling(
        params=params,
        greedy=greedy,
        inverse_temperature=0.0 if greedy else 1.0 / params.temperature,
        penalized=(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        != (1.0, 0.0, 0.0),
        ending_ids=integers_on(device, sorted(ending)) if needs_ending else None,
        bias_ids=integers_on(device, list(bias)) if bias else None,
        bias=floats_on(device, list(bias.values())) if bias else None,
        bad_words=_bad_words(params, device) if params.bad_words else None,
    )


def _bad_words(params: SamplingParams, device: torch.device) -> BadWords:
    words = params.bad_words
    longest = max(map(len, words)) - 1
    num_prefix = torch.tensor([len(word) - 1 for word in words])
    prefixes = [(0,) * (longest + 1 - len(word)) + word[:-1] for word in words]
    return BadWords(
        prefixes=to_device(torch.tensor(prefixes, dtype=torch.int64), device),
        padding=to_device(torch.arange(longest) < longest - num_prefix[:, None], device),
        num_prefix=to_device(num_prefix, device),
        last=integers_on(device, [word[-1] for word in words]),
    )
