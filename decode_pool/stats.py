"""What a decode worker tells of itself."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from core.lifetime import PrefillDecision
from decode_pool.live_request import RequestState
from kv_transfer.handoff.decode_messages import AttemptOutcome

EXPOSED_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Histogram:
    """Counts by upper bound, as Prometheus keeps them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> tuple[tuple[int, ...], float]:
        """Return one count for each bound and one for more (not cumulated), and the sum."""
        return tuple(self._counts), self._sum


class DecodeStats(msgspec.Struct, frozen=True):
    """A snapshot; counters only grow.

    Attributes:
        requests_by_state: gauges; they sum to the requests in flight here.
        handoffs_by_outcome: attempts that were asked, by how they ended.
        decisions: requests by where their prompt was computed.
        exposed_transfer: from first token received to KV complete, see `Histogram.snapshot`.
        quarantined_attempts: gauge.
        quarantine_s: seconds that attempts spent in quarantine, summed.
        corrupt_writes: whose bytes were not those that left.
    """

    requests_by_state: dict[RequestState, int]
    handoffs_by_outcome: dict[AttemptOutcome, int]
    decisions: dict[PrefillDecision, int]
    exposed_transfer: tuple[tuple[int, ...], float]
    quarantined_attempts: int
    quarantine_s: float
    fences: int
    corrupt_writes: int = 0
