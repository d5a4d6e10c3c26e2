"""The engine's series: names, labels, and sums that must agree."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from core.ids import Attempt, HandoffId, RequestId
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from engine.events import Mode
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


def test_sequences_between_two_workers_are_visible_on_both() -> None:
    decode, prefill = Replica(), Replica()
    prompt = tuple(range(100, 150))
    request = EngineRequest(RequestId("r"), prompt, SamplingParams(max_tokens=3))
    handoff = HandoffId(RequestId("r"), Attempt(1, 1))
    decode.engine.add(request, Mode.RECEIVE, handoff=handoff)
    decode.step()
    prefill.engine.add(request, Mode.PREFILL)
    prefill.step()

    def value(replica: Replica, name: str, **labels: str) -> float | None:
        return registry_of(replica).get_sample_value(name, {**LABELS, **labels})

    assert value(decode, "vllm:num_requests_waiting") == 1
    assert value(decode, "vllm:num_requests_running") == 0
    assert value(prefill, "vllm:num_requests_running") == 1
    assert value(prefill, "dovetail:engine_sequences", state="held") == 1
    # The prompt is counted where it is decoded.
    assert value(prefill, "vllm:prompt_tokens_total") == 0
    assert value(prefill, "vllm:prefix_cache_queries_total") == 0
    assert value(prefill, "dovetail:peer_prompt_tokens_total", source="local_compute") == 50
    decode.engine.kv_arrived(handoff, [1], num_received=50, num_peer_cached=32)
    assert value(decode, "vllm:prompt_tokens_total") == 50
    assert value(decode, "dovetail:prompt_tokens_total", source="transferred") == 50
    assert value(decode, "vllm:prefix_cache_queries_total") == 50
    assert value(decode, "vllm:prefix_cache_hits_total") == 32


def test_a_prompt_counts_once_whatever_happens_to_its_request() -> None:
    replica = Replica()
    prompt = tuple(range(100, 150))
    fresh = EngineRequest(RequestId("r"), prompt, SamplingParams(max_tokens=3))
    begun = EngineRequest(RequestId("r"), prompt, SamplingParams(max_tokens=3), outputs=((1,),))
    first, second = (HandoffId(RequestId("r"), Attempt(1, trial)) for trial in (1, 2))
    replica.engine.add(fresh, Mode.RECEIVE, handoff=first)
    replica.step()
    replica.engine.retry(first, second, begun)  # its first token was told, its KV never came
    replica.step()
    replica.engine.compute_locally(second, begun)
    replica.run()
    for handoff in (first, second):
        replica.engine.end_quarantine(handoff)
    stats = replica.engine.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_received) == (50, 0)
    assert (stats.prefix_queries, stats.prefix_hits) == (50, 0)
    # Dispatched again with outputs: it was counted where the first of them was sampled.
    again = EngineRequest(RequestId("s"), prompt, SamplingParams(max_tokens=3), outputs=((1,),))
    replica.engine.add(again, Mode.LOCAL)
    replica.run()
    assert replica.engine.stats().prefix_queries == 50
