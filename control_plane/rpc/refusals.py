"""Counts the peers that are refused, by the field in which the two ends differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from control_plane.rpc.handshake import reason_of


class PeersRefused(Collector):
    """One process's count, of its server and of the streams that it opens; register it once.

    Both ends of a stream count its refusal, each at its own `/metrics`. A router counts a worker,
    too, whose stream it keeps and which it never pairs.
    """

    def __init__(self) -> None:
        self._num_by_reason: Counter[str] = Counter()

    def count(self, difference: str) -> None:
        """Count a refusal.

        Args:
            difference: as `control_plane.rpc.handshake.difference` words it, or its field alone.
        """
        self._num_by_reason[reason_of(difference)] += 1

    def collect(self) -> Iterable[Metric]:
        """Yield one series a reason."""
        refused = CounterMetricFamily(
            "dovetail:peers_refused",
            "Peers refused at the handshake or never paired, by the field that differs",
            labels=["reason"],
        )
        for reason, count in sorted(self._num_by_reason.items()):
            refused.add_metric([reason], count)
        yield refused
