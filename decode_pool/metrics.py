"""A decode worker's `dovetail:` series (api.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from decode_pool.stats import EXPOSED_BUCKETS_S, DecodeStats

LabelT = TypeVar("LabelT", bound=str)


class DecodeCollector(Collector):
    """Reads a worker's counters at every scrape; `registry.register(DecodeCollector(...))`."""

    def __init__(self, stats: Callable[[], DecodeStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Yield the series."""
        stats = self._stats()
        if stats is None:  # the worker does not run yet
            return
        states = GaugeMetricFamily(
            "dovetail:worker_requests", "Requests at this worker, by state", labels=["state"]
        )
        yield _by_label(states, stats.requests_by_state)
        outcomes = CounterMetricFamily(
            "dovetail:handoffs", "Handoff attempts that ended, by outcome", labels=["outcome"]
        )
        yield _by_label(outcomes, stats.handoffs_by_outcome)
        decisions = CounterMetricFamily(
            "dovetail:prompts", "Requests, by where their prompt was computed", labels=["decision"]
        )
        yield _by_label(decisions, stats.decisions)
        yield _exposed(stats)
        yield GaugeMetricFamily(
            "dovetail:quarantined_attempts",
            "Abandoned attempts whose blocks a late write may reach",
            stats.quarantined_attempts,
        )
        yield CounterMetricFamily(
            "dovetail:quarantine_seconds", "Seconds attempts were quarantined", stats.quarantine_s
        )
        yield CounterMetricFamily("dovetail:fences", "Times the region was fenced", stats.fences)
        yield CounterMetricFamily(
            "dovetail:corrupt_writes",
            "KV writes whose bytes were not those that left (kv_transfer.verify)",
            stats.corrupt_writes,
        )


def _by_label(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[LabelT, int]
) -> Metric:
    for label, value in values.items():
        family.add_metric([str(label)], value)
    return family


def _exposed(stats: DecodeStats) -> Metric:
    counts, total = stats.exposed_transfer
    family = HistogramMetricFamily(
        "dovetail:exposed_transfer_seconds", "From the first token received to the KV complete"
    )
    bounds = [*map(str, EXPOSED_BUCKETS_S), "+Inf"]
    cumulated = map(float, accumulate(counts))
    family.add_metric([], list(zip(bounds, cumulated, strict=True)), total)
    return family
