"""What workers tell through the ledger of their prefix caches, for the scrape of a router.

The same totals are at each worker's own `/metrics`; here they are for who sees the router alone,
under names of their own, so that a sum over all processes counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from control_plane.ledger.records import CacheCounters
from core.ids import WorkerId


class LedgerCollector(Collector):
    """Register it with a router's registry.

    Args:
        counters: `LedgerReader.counters`, asked at each scrape.
    """

    def __init__(self, counters: Callable[[], Mapping[WorkerId, CacheCounters]]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        """Yield one series a worker and source of prompt tokens, and one a worker."""
        tokens = CounterMetricFamily(
            "dovetail:ledger_prompt_tokens",
            "Prompt tokens by worker and by where their KV came from, as the ledger has it",
            labels=["worker", "source"],
        )
        preemptions = CounterMetricFamily(
            "dovetail:ledger_preemptions",
            "Sequences that lost their blocks, by worker, as the ledger has it",
            labels=["worker"],
        )
        for worker_id, counters in sorted(self._counters().items()):
            for source, num_tokens in counters.hits.items():
                tokens.add_metric([worker_id, source], num_tokens)
            preemptions.add_metric([worker_id], counters.preemptions)
        yield tokens
        yield preemptions
