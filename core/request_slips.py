"""What no worker can serve, whoever sent it: the checks at the door of a worker. Pure.

A router's own checks, with the words that clients read, come before; these keep a peer's slip, or
another version's, from ending a worker.
"""

from __future__ import annotations

import math

from core.request import EngineRequest
from core.sampling_params import SamplingParams

MAX_SAMPLES = 1024
"""Of one request; state is kept for each before any runs."""


def slip_of(request: EngineRequest, remaining_s: float) -> str:
    """Name the first field that cannot be, its value and what would be right; empty if none."""
    if not request.prompt:
        return "prompt: is empty; must have at least one token"
    if math.isnan(remaining_s):
        return f"remaining_s = {remaining_s}: must be a number"
    slip = _slip_of_sampling(request.sampling)
    if slip:
        return slip
    if len(request.outputs) not in (0, request.sampling.n):
        return f"outputs: {len(request.outputs)} samples; must be none or n = {request.sampling.n}"
    return ""


def _slip_of_sampling(sampling: SamplingParams) -> str:
    if not 1 <= sampling.n <= MAX_SAMPLES:
        return f"n = {sampling.n}: must be from 1 to {MAX_SAMPLES}"
    if sampling.max_tokens < 1:
        return f"max_tokens = {sampling.max_tokens}: must be at least 1"
    numbers = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **{f"logit_bias of token {token}": bias for token, bias in sampling.logit_bias},
    }
    for name, value in numbers.items():
        if not math.isfinite(value):
            return f"{name} = {value}: must be a finite number"
    if sampling.temperature < 0 or sampling.repetition_penalty <= 0:
        return "temperature, repetition_penalty: must be at least 0, and above it"
    if () in sampling.bad_words:
        return "bad_words: one is empty; must have at least one token"
    return ""
