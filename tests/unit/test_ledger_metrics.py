"""A router's scrape shows what workers told through the ledger."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from control_plane.ledger.metrics import LedgerCollector
from control_plane.ledger.records import CacheCounters
from core.ids import WorkerId


def test_prompt_tokens_by_worker_and_source() -> None:
    counters = {
        WorkerId("w1"): CacheCounters({"local_cache": 32, "local_compute": 5}, preemptions=2),
        WorkerId("w0"): CacheCounters(),
    }
    registry = CollectorRegistry()
    registry.register(LedgerCollector(lambda: counters))
    for source, tokens in counters[WorkerId("w1")].hits.items():
        labels = {"worker": "w1", "source": source}
        assert registry.get_sample_value("dovetail:ledger_prompt_tokens_total", labels) == tokens
    for worker, preemptions in (("w0", 0), ("w1", 2)):
        value = registry.get_sample_value("dovetail:ledger_preemptions_total", {"worker": worker})
        assert value == preemptions
    del counters[WorkerId("w1")]
    gone = registry.get_sample_value("dovetail:ledger_preemptions_total", {"worker": "w1"})
    assert gone is None
