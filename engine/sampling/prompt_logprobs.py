"""Log-probabilities of prompt tokens: what the logits before each say of the token that came."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from core.request import PromptLogprobs
from engine.sampling.read_back import floats, integers


class PromptScores(NamedTuple):
    """Scores of consecutive prompt tokens, on the device until `ReadBack` has copied them.

    Attributes:
        chosen: float32 [tokens].
        ranks: int64 [tokens], from 1.
        top_ids: int64 [tokens, num_top].
        top: float32, likewise, most likely first.
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> PromptScores:
    """Score one token a row, without a second tensor of the logits' size.

    Args:
        logits: float32 [tokens, vocab_size], unmodified, of the positions before the tokens.
        token_ids: int64 [tokens].
        num_top: alternatives; at most the vocabulary.
    """
    total = logits.logsumexp(dim=1)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits >= chosen).sum(dim=1)
    top, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=1)
    return PromptScores(chosen[:, 0] - total, ranks, top_ids, top - total[:, None])


def joined(parts: list[PromptScores]) -> PromptScores:
    """Return the scores of slices of one run of tokens as one."""
    return PromptScores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def to_host(scores: PromptScores, start: int) -> PromptLogprobs:
    """Return the values; the tensors are on the CPU by now.

    Args:
        start: index in the prompt of the first token.
    """
    return PromptLogprobs(
        start=start,
        chosen=tuple(floats(scores.chosen)),
        ranks=tuple(integers(scores.ranks)),
        num_top=scores.top.shape[1],
        top_ids=tuple(integers(scores.top_ids.flatten())),
        top=tuple(floats(scores.top.flatten())),
    )
