"""Penalties on tokens seen: functions of the tokens so far, rebuilt wherever a sequence moves."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FLOAT32 = torch.finfo(torch.float32)
_LARGEST_LOGIT = 1e30
"""So that no temperature (times 1e5 at most) makes a logit infinite, and a row of it NaN."""


class History(NamedTuple):
    """Tokens so far of each row.

    Attributes:
        token_ids: int64 [rows, length], anything beyond a row's own end.
        lengths: int64 [rows], tokens so far.
        num_prompt: int64 [rows], how many of them are prompt.
    """

    token_ids: Tensor
    lengths: Tensor
    num_prompt: Tensor


class PenaltyFactors(NamedTuple):
    """Float32 [rows] each: repetition divides, presence and frequency subtract."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def apply_penalties(logits: Tensor, history: History, factors: PenaltyFactors) -> None:
    """Change `logits`, float32 [rows, vocab_size], in place.

    First repetition (Keskar et al. 2019, section 4.1: positive logits divided, others multiplied)
    on every token of prompt and output, then OpenAI's frequency (times its count) and presence on
    tokens of the output. Only the columns of tokens in the history are touched.
    """
    index = torch.arange(history.token_ids.shape[1], device=logits.device)[None]
    known = index < history.lengths[:, None]
    # Slots past the end repeat the row's first token: a harmless duplicate, as all duplicates are.
    token_ids = torch.where(known, history.token_ids, history.token_ids[:, :1])
    is_output = known & (index >= history.num_prompt[:, None])
    counts = torch.zeros_like(logits).scatter_add_(1, token_ids, is_output.to(logits.dtype))
    count = counts.gather(1, token_ids)
    seen = logits.gather(1, token_ids)
    # A client's float64 may be 0 or infinite in float32.
    repetition = factors.repetition.clamp(_FLOAT32.tiny, _FLOAT32.max)[:, None]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= factors.frequency[:, None] * count
    seen -= factors.presence[:, None] * (count > 0)
    logits.scatter_(1, token_ids, seen.clamp_(max=_LARGEST_LOGIT))
