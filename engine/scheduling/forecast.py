"""How many blocks the running requests will need at their peak.

The "past-future" scheduler of LightLLM (Gong et al., ASPLOS 2025): lengths are forecast from the
lengths of requests that finished (`max_tokens` often defaults to the rest of the context, so it is
no forecast), and memory from the moments at which running requests finish and give theirs back:

    sort by remaining tokens, longest first; when number i finishes, 0..i are still there, each
    grown by remaining_i: peak = max over i of  sum(used_0..i) + (i + 1) * remaining_i

Here the forecast is a quantile of the longer ones in the history instead of a random draw, so that
decisions are a function of their inputs. Until a first sample has finished there is no history, and
every sample is taken to reach 256 tokens (`PRIOR_TOKENS`), or its max_tokens where that is less.
Where answers are longer, the first wave is admitted too freely, and preemption makes up for it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

import msgspec

PRIOR_TOKENS = 256
"""Forecast length of a sample while none has finished."""


class Growth(msgspec.Struct, frozen=True):
    """What one running sample occupies and may still need, in tokens.

    Attributes:
        used: of blocks that it alone accounts for (shared ones count once, elsewhere).
        remaining: tokens that it is expected to generate still.
    """

    used: int
    remaining: int


def peak_tokens(growths: Iterable[Growth]) -> int:
    """Return the most tokens that these samples occupy together until all have finished."""
    ordered = sorted(growths, key=lambda growth: growth.remaining, reverse=True)
    used = accumulate(growth.used for growth in ordered)
    return max(
        (
            used_tokens + (i + 1) * growth.remaining
            for i, (used_tokens, growth) in enumerate(zip(used, ordered, strict=True))
        ),
        default=0,
    )


class LengthHistory:
    """Lengths of the last `window` finished samples, and what they say about a running one.

    Args:
        quantile: which of the longer ones is the forecast; higher admits less and preempts less.
        prior: forecast total length, in tokens, while nothing has finished; a sample that reached
            half of it is taken to double.
    """

    def __init__(
        self, *, window: int = 1000, quantile: float = 0.75, prior: int = PRIOR_TOKENS
    ) -> None:
        self._window = window
        self._quantile = quantile
        self._prior = prior
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def record(self, num_generated: int) -> None:
        """Remember a finished sample's length."""
        self._recent.append(num_generated)
        insort(self._sorted, num_generated)
        if len(self._recent) > self._window:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]

    def remaining(self, num_generated: int, max_tokens: int) -> int:
        """Forecast how many tokens a sample with `num_generated` still generates, at most
        `max_tokens` in all."""
        return max(0, min(self._total(num_generated), max_tokens) - num_generated)

    def _total(self, num_generated: int) -> int:
        start = bisect_right(self._sorted, num_generated)
        num_longer = len(self._sorted) - start
        if num_longer:
            return self._sorted[start + int(self._quantile * (num_longer - 1))]
        # Longer than all before: what lasted long lasts on (a heavy tail's expectation).
        return max(2 * num_generated, 0 if self._sorted else self._prior)
