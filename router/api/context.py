"""Fits a request to the model's context once the prompt's length is known."""

from __future__ import annotations

import msgspec

from core.errors import RequestError
from core.sampling_params import SamplingParams
from router.api.fields import refuse
from router.api.generation_params import GenerationParams

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for text completions; chat takes the rest of the context."""


def truncate_prompt(
    prompt: tuple[int, ...], params: GenerationParams, *, max_model_len: int
) -> tuple[int, ...]:
    """Keep the last `truncate_prompt_tokens` tokens; -1 keeps what leaves room for `max_tokens`.

    Raises:
        RequestError: 400; more than the context holds.
    """
    keep = params.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep > max_model_len:
        right = f"at most {max_model_len}, the model's context, or -1"
        refuse("truncate_prompt_tokens", keep, right)
    if keep == -1:
        keep = max(1, max_model_len - (params.max_tokens or 1))
    return prompt[-keep:]


def fit_to_context(
    params: GenerationParams,
    num_prompt_tokens: int,
    *,
    max_model_len: int,
    default_max: int | None,
    seed: int | None = None,
) -> SamplingParams:
    """Return the sampling parameters with `max_tokens` set.

    Args:
        default_max: `max_tokens` where none was given, cut to the context; None: all of its rest.
        seed: drawn for this prompt; None keeps that of `params`.

    Raises:
        RequestError: 400; an empty prompt, or `context_length_exceeded`.
    """
    if num_prompt_tokens == 0:
        msg = "the prompt is empty: it must hold at least one token"
        raise RequestError(msg, param="prompt", code="empty_prompt")
    room = max_model_len - num_prompt_tokens
    if room < 1 or (params.max_tokens or 0) > room:
        wanted = params.max_tokens or 1
        msg = (
            f"the model's context is {max_model_len} tokens, but {num_prompt_tokens + wanted} were "
            f"asked for ({num_prompt_tokens} of the prompt, {wanted} to generate): shorten the "
            "prompt or lower max_tokens"
        )
        raise RequestError(msg, param="max_tokens", code="context_length_exceeded")
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = room if default_max is None else min(default_max, room)
    max_tokens = max(1, max_tokens)  # engines generate one at least; an echo alone drops it
    min_tokens = min(params.sampling.min_tokens, max_tokens)
    given = params.sampling
    return msgspec.structs.replace(
        given,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=given.seed if seed is None else seed,
    )
