"""What no prefill worker can mean: the checks at the decode worker's door. Pure.

A peer's slip, or another version's rules, must end its attempt and nothing else. Believed, an end
that our own rules do not see leaves a request that never ends, and a token id beyond the vocabulary
ends the step, and the worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from core.messages import FirstTokens, HandoffScored
from core.request import EngineRequest, PromptLogprobs
from engine.token_rules import finish_reason


def slip_of(
    request: EngineRequest, message: object, *, next_scored: int, vocab_size: int | None
) -> str:
    """Name the first field that cannot be, its value and what would be right; empty if none.

    Args:
        request: as it was asked for; where it has outputs, no token is taken.
        next_scored: the prompt token whose log-probability is told next.
        vocab_size: of the model; None where it is not known.
    """
    match message:
        case HandoffScored(_, scores):
            return _slip_of_scores(request, scores, next_scored)
        case FirstTokens():
            slip = _slip_of_numbers(request, message)
            if slip or request.outputs:
                return slip
            if request.wants_prompt_logprobs and next_scored < len(request.prompt):
                return f"token_ids: came before the log-probability of prompt token {next_scored}"
            return _slip_of_tokens(request, message, vocab_size)
        case _:
            return ""


def _slip_of_scores(request: EngineRequest, scores: PromptLogprobs, next_scored: int) -> str:
    if not request.wants_prompt_logprobs:
        return "logprobs: of a prompt for which none were asked"
    if not 1 <= scores.start <= scores.end <= len(request.prompt):
        return f"logprobs: of tokens {scores.start} to {scores.end}, not all of the prompt"
    if scores.start > next_scored:
        return f"logprobs: from token {scores.start} on, where {next_scored} is the next"
    num_tokens, num_tops = len(scores.chosen), len(scores.chosen) * scores.num_top
    lengths = (len(scores.ranks), len(scores.top_ids), len(scores.top))
    if lengths != (num_tokens, num_tops, num_tops) or _has_nan((*scores.chosen, *scores.top)):
        return "logprobs: must be numbers, and as many as its ranks and top_ids"
    return ""


def _slip_of_numbers(request: EngineRequest, message: FirstTokens) -> str:
    num_prompt = len(request.prompt)
    if message.cached_tokens > num_prompt:
        return f"cached_tokens = {message.cached_tokens}: the prompt has {num_prompt}"
    for name, seconds in (("queue_s", message.queue_s), ("prefill_s", message.prefill_s)):
        if not (math.isfinite(seconds) and seconds >= 0):
            return f"{name} = {seconds}: must be a number of at least 0"
    return ""


def _slip_of_tokens(request: EngineRequest, message: FirstTokens, vocab_size: int | None) -> str:
    sampling = request.sampling
    num_logprobs = 0 if sampling.logprobs is None else sampling.n
    lengths = (len(message.token_ids), len(message.finish_reasons), len(message.logprobs))
    if lengths != (sampling.n, sampling.n, num_logprobs):
        return f"token_ids, finish_reasons, logprobs: {lengths} of them for n = {sampling.n}"
    for entry in message.logprobs:
        if len(entry.top_ids) != len(entry.top) or _has_nan((entry.chosen, *entry.top)):
            return "logprobs: must be numbers, one for each of top_ids"
    for token_id, reason in zip(message.token_ids, message.finish_reasons, strict=True):
        if vocab_size is not None and token_id >= vocab_size:
            return f"token_ids: {token_id} must be below {vocab_size}, the model's vocabulary"
        ours = finish_reason(token_id, 1, sampling)
        if reason is not ours:
            return f"finish_reasons: {reason} after token {token_id}, where it is {ours} here"
    return ""


def _has_nan(values: Iterable[float]) -> bool:
    return any(map(math.isnan, values))
