"""Kullback-Leibler divergence of next-token distributions. numpy alone: peers' children use it."""

from __future__ import annotations

from typing import Any

import numpy as np


def mean_kl(reference: Any, other: Any) -> float:
    """Return the mean over rows of sum p (log p - log q), in nats.

    Args:
        reference: logits of p, float32 [rows, vocab_size].
        other: logits of q, likewise.
    """
    total = 0.0
    for first in range(0, len(reference), 100):
        log_p = _log_softmax(reference[first : first + 100])
        log_q = _log_softmax(other[first : first + 100])
        total += float((np.exp(log_p) * (log_p - log_q)).sum())
    return total / len(reference)


def _log_softmax(logits: Any) -> Any:
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
