"""A prefill worker's `dovetail:` series (api.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prefill_pool.stats import PrefillStats


class PrefillCollector(Collector):
    """Reads a worker's counters at every scrape; `registry.register(PrefillCollector(...))`."""

    def __init__(self, stats: Callable[[], PrefillStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Yield the series."""
        stats = self._stats()
        if stats is None:  # the worker does not run yet
            return
        stages = GaugeMetricFamily(
            "dovetail:prefill_attempts", "Attempts under way, by stage", labels=["stage"]
        )
        for stage, count in stats.attempts_by_stage.items():
            stages.add_metric([stage], count)
        outcomes = CounterMetricFamily(
            "dovetail:prefill_handoffs", "Attempts that ended, by outcome", labels=["outcome"]
        )
        for outcome, count in stats.attempts_by_outcome.items():
            outcomes.add_metric([outcome], count)
        yield stages
        yield outcomes
        yield GaugeMetricFamily(
            "dovetail:writes_pending", "Fabric writes posted and not over", stats.writes_pending
        )
        yield GaugeMetricFamily(
            "dovetail:tombstones", "Ended attempts that are remembered", stats.tombstones
        )
        for name, what, value in (
            ("blocks_pushed", "KV blocks written to decode workers", stats.blocks_pushed),
            ("bytes_pushed", "Bytes written to decode workers", stats.bytes_pushed),
            ("writes_failed", "Fabric writes that failed", stats.writes_failed),
            ("agent_renewals", "Fabric agents destroyed to free blocks", stats.agent_renewals),
        ):
            yield CounterMetricFamily(f"dovetail:{name}", what, value)
