"""Which tokens may be drawn: min-p, top-k, top-p, in this order, on temperature-scaled logits.

A filter sets logits to -inf in place. Each keeps all tokens that tie with its last kept one (vLLM's
top-k does too), so that the kept set depends on the logits alone and not on a sort's order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LIKELY = 1024  # top-p is decided within so many tokens nearly always; the rest need no sorting


def min_p_filter(scores: Tensor, min_p: Tensor) -> None:
    """Keep tokens of at least min_p times the largest probability.

    Args:
        scores: float32 [rows, vocab_size], changed in place.
        min_p: float32 [rows] in [0, 1]; 0 keeps all.
    """
    threshold = scores.max(dim=1).values + min_p.log()
    _drop_below(scores, threshold)


def top_k_filter(scores: Tensor, top_k: Tensor, largest_k: int) -> None:
    """Keep the k most likely tokens.

    Args:
        scores: float32 [rows, vocab_size], changed in place.
        top_k: int64 [rows], from 1 to largest_k.
        largest_k: known to the host, at most vocab_size.
    """
    likeliest = scores.topk(largest_k, dim=1).values
    _drop_below(scores, likeliest.gather(1, top_k[:, None] - 1)[:, 0])


def top_p_filter(scores: Tensor, top_p: Tensor) -> None:
    """Keep the smallest set of most likely tokens whose probability reaches p (Holtzman et al.
    2020).

    Args:
        scores: float32 [rows, vocab_size], changed in place.
        top_p: float32 [rows] in (0, 1); the most likely token always stays.
    """
    total = scores.logsumexp(dim=1)
    threshold, reached = _nucleus_threshold(scores, top_p, total, min(_LIKELY, scores.shape[1]))
    if scores.shape[1] > _LIKELY:
        if scores.device.type == "cpu":
            rest = (~reached).nonzero()[:, 0]
        else:  # no shape from data on a device: sort all
            rest = torch.arange(len(scores), device=scores.device)
        if len(rest):
            threshold[rest], _ = _nucleus_threshold(
                scores[rest], top_p[rest], total[rest], scores.shape[1]
            )
    _drop_below(scores, threshold)


def _nucleus_threshold(
    scores: Tensor, top_p: Tensor, total: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return the least kept score, judged from the `count` likeliest, and whether p was reached."""
    likeliest = scores.topk(count, dim=1).values
    cumulative = (likeliest - total[:, None]).exp_().cumsum(dim=1)
    num_below = (cumulative < top_p[:, None]).sum(dim=1)  # tokens after which p is not reached
    last = num_below.clamp_(max=count - 1)
    return likeliest.gather(1, last[:, None])[:, 0], cumulative[:, -1] >= top_p


def _drop_below(scores: Tensor, threshold: Tensor) -> None:
    scores.masked_fill_(scores < threshold[:, None], -math.inf)
