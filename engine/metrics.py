"""The engine's Prometheus series: vLLM's engine gauges under vLLM's names, and `dovetail:` ones.

Workers expose engine gauges only; series of requests belong to the router, so that sums over all
processes are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.events import EngineStats
from engine.scheduling.counters import ITERATION_TOKENS_BOUNDS

_LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """Turns a snapshot of `EngineStats` into series at each scrape.

    Args:
        stats: returns the latest snapshot; called on the scraping thread, so it must not reach into
            the engine (keep the last one that the engine's thread told).
        model_name: the served model.
        engine: the worker's id.
        block_size: positions a block, for `vllm:cache_config_info`.
    """

    def __init__(
        self, stats: Callable[[], EngineStats], *, model_name: str, engine: str, block_size: int
    ) -> None:
        self._stats = stats
        self._label_values = (model_name, engine)
        self._block_size = block_size

    def collect(self) -> Iterable[Metric]:
        """Return all series."""
        stats = self._stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield self._iteration_tokens(stats)
        yield self._cache_config(stats)
        yield from self._by_label(stats)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        in_use = stats.blocks_owned + stats.blocks_reserved + stats.blocks_quarantined
        usage = in_use / stats.blocks_total if stats.blocks_total else 0.0
        usage_help = "Share of KV blocks in use, 0 to 1; evictable cached blocks are free."
        for name, value, documentation in (
            (
                "vllm:num_requests_running",
                stats.num_running + stats.num_held,
                "Sequences in the batch, or whose KV is on its way to a decode worker.",
            ),
            (
                "vllm:num_requests_waiting",
                stats.num_waiting + stats.num_receiving,
                "Sequences without blocks, or whose KV is on its way from a prefill worker.",
            ),
            ("vllm:num_requests_swapped", 0, "Sequences swapped to the host."),
            ("vllm:kv_cache_usage_perc", usage, usage_help),
            ("vllm:gpu_cache_usage_perc", usage, f"Older name. {usage_help}"),
            ("vllm:gpu_cache_usage_factor", usage, f"Older name. {usage_help}"),
        ):
            gauge = GaugeMetricFamily(name, documentation, labels=_LABELS)
            gauge.add_metric(self._label_values, value)
            yield gauge

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        prompt_tokens = (
            stats.prompt_tokens_computed + stats.prompt_tokens_cached + stats.prompt_tokens_received
        )
        for name, value, documentation in (
            ("vllm:prompt_tokens", prompt_tokens, "Prompt tokens of requests served."),
            ("vllm:generation_tokens", stats.generated_tokens, "Tokens sampled here."),
            (
                "vllm:prefix_cache_queries",
                stats.prefix_queries,
                "Prompt tokens of requests served.",
            ),
            ("vllm:prefix_cache_hits", stats.prefix_hits, "Of those, what no worker computed."),
            ("vllm:num_preemptions", stats.preemptions, "Sequences that lost their blocks."),
            ("dovetail:engine_steps", stats.steps, "Steps submitted."),
            ("dovetail:block_copies", stats.block_copies, "Blocks cloned (copy-on-write)."),
        ):
            counter = CounterMetricFamily(name, documentation, labels=_LABELS)
            counter.add_metric(self._label_values, value)
            yield counter

    def _iteration_tokens(self, stats: EngineStats) -> Metric:
        bounds = [*(str(float(bound)) for bound in ITERATION_TOKENS_BOUNDS), "+Inf"]
        histogram = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Query tokens a step.", labels=_LABELS
        )
        counts = stats.iteration_tokens or (0,) * len(bounds)
        buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
        histogram.add_metric(self._label_values, buckets, stats.iteration_tokens_sum)
        return histogram

    def _cache_config(self, stats: EngineStats) -> Metric:
        info = InfoMetricFamily("vllm:cache_config", "KV cache's shape.", labels=_LABELS)
        values = {"block_size": str(self._block_size), "num_gpu_blocks": str(stats.blocks_total)}
        info.add_metric(self._label_values, values)
        return info

    def _by_label(self, stats: EngineStats) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "dovetail:blocks", "KV blocks; the states sum to the pool.", labels=(*_LABELS, "state")
        )
        for state in ("free", "cached", "owned", "reserved", "quarantined"):
            value = getattr(stats, f"blocks_{state}")
            blocks.add_metric((*self._label_values, state), value)
        yield blocks
        sequences = GaugeMetricFamily(
            "dovetail:engine_sequences", "Sequences in the engine.", labels=(*_LABELS, "state")
        )
        for state in ("waiting", "running", "receiving", "held"):
            value = getattr(stats, f"num_{state}")
            sequences.add_metric((*self._label_values, state), value)
        yield sequences
        tokens = CounterMetricFamily(
            "dovetail:prompt_tokens",
            "Prompt tokens by where their KV came from; they sum to vllm:prompt_tokens_total.",
            labels=(*_LABELS, "source"),
        )
        for source, value in (
            ("local_compute", stats.prompt_tokens_computed),
            ("local_cache", stats.prompt_tokens_cached),
            ("host_cache", 0),
            ("transferred", stats.prompt_tokens_received),
        ):
            tokens.add_metric((*self._label_values, source), value)
        yield tokens
        for_peers = CounterMetricFamily(
            "dovetail:peer_prompt_tokens",
            "Prompt tokens of handoffs by where their KV came from; the decode worker that asked "
            "counts them as transferred.",
            labels=(*_LABELS, "source"),
        )
        for source, value in (
            ("local_compute", stats.peer_tokens_computed),
            ("local_cache", stats.peer_tokens_cached),
        ):
            for_peers.add_metric((*self._label_values, source), value)
        yield for_peers
