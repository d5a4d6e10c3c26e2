"""The engine's series: names, labels, and sums that must agree."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.metrics import EngineCollector
from tests.replica import Replica

LABELS = {"model_name": "m", "engine": "decode-0"}


def registry_of(replica: Replica) -> CollectorRegistry:
    registry = CollectorRegistry()
    collector = EngineCollector(
        replica.engine.stats, model_name="m", engine="decode-0", block_size=16
    )
    registry.register(collector)
    return registry


def test_gauges_and_counters_under_vllm_names() -> None:
    replica = Replica(num_blocks=16)
    replica.add(range(100, 150), max_tokens=3)
    replica.step()
    registry = registry_of(replica)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {**LABELS, **labels})

    assert value("vllm:num_requests_running") == 1
    assert value("vllm:num_requests_waiting") == 0
    assert value("vllm:num_requests_swapped") == 0
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc", "gpu_cache_usage_factor"):
        assert value(f"vllm:{name}") == pytest.approx(4 / 16)
    assert value("vllm:prompt_tokens_total") == 50
    assert value("vllm:generation_tokens_total") == 1
    assert value("vllm:prefix_cache_queries_total") == 50
    assert value("vllm:prefix_cache_hits_total") == 0
    assert value("vllm:num_preemptions_total") == 0
    assert value("vllm:cache_config_info", block_size="16", num_gpu_blocks="16") == 1
    assert value("vllm:iteration_tokens_total_bucket", le="32.0") == 0
    assert value("vllm:iteration_tokens_total_bucket", le="64.0") == 1
    assert value("vllm:iteration_tokens_total_count") == 1
    assert value("vllm:iteration_tokens_total_sum") == 50
    states = ("free", "cached", "owned", "reserved", "quarantined")
    assert sum(value("dovetail:blocks", state=state) or 0 for state in states) == 16
    assert value("dovetail:engine_sequences", state="running") == 1
    sources = ("local_compute", "local_cache", "host_cache", "transferred")
    by_source = [value("dovetail:prompt_tokens_total", source=source) for source in sources]
    assert by_source == [50, 0, 0, 0]


def test_an_idle_engine_says_zero() -> None:
    text = generate_latest(registry_of(Replica())).decode()
    assert 'vllm:kv_cache_usage_perc{engine="decode-0",model_name="m"} 0.0' in text
