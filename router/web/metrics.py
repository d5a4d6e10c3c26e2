"""Request-level metrics under vLLM's names, labels and buckets, and the router's own.

vLLM defines these series per engine; here the router has them alone, since only it sees a request
whole (`engine` is always "0"), so that a sum over all processes counts each request once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from core.lifetime import Duration, Lifetime, RequestTrace
from core.request import FinishReason
from core.sampling_params import SamplingParams
from router.fast_counter import FastCounter
from router.fast_histogram import FastHistogram, Labelled

_LABELS = ("model_name", "engine")
_ENGINE = "0"

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_PARAMS_N = (1.0, 2.0, 5.0, 10.0, 20.0)
State = Literal["preparing", "waiting", "streaming"]
"""Before dispatch; before the first token; after."""


class ModelMetrics:
    """The request-level series of one model."""

    def __init__(self, series: _Series, model: str) -> None:
        labels = (model, _ENGINE)
        self.ttft = series.ttft.labelled(labels)
        self._e2e = series.e2e.labelled(labels)
        self._queue = series.queue.labelled(labels)
        self._prefill = series.prefill.labelled(labels)
        self._decode = series.decode.labelled(labels)
        self._inference = series.inference.labelled(labels)
        self._prompt_tokens = series.prompt_tokens.labelled(labels)
        self._generation_tokens = series.generation_tokens.labelled(labels)
        self._max_generation_tokens = series.max_generation_tokens.labelled(labels)
        self._n = series.n.labelled(labels)
        self._max_tokens = series.max_tokens.labelled(labels)
        self._success = {
            reason: FastCounter(series.success.labels(*labels, reason.value))
            for reason in FinishReason
        }
        self.inter_token = series.inter_token.labelled(labels)

    def ended(self, reason: FinishReason) -> None:
        """Count a request by how it ended."""
        self._success[reason].inc()

    def settle(self) -> None:
        """Let what was counted be seen."""
        for success in self._success.values():
            success.settle()

    def observe_sizes(
        self, sampling: SamplingParams, num_prompt_tokens: int, generated: list[int]
    ) -> None:
        """Record a request's sizes; `generated`: tokens of each sample."""
        self._prompt_tokens.observe(num_prompt_tokens)
        self._generation_tokens.observe(sum(generated))
        self._max_generation_tokens.observe(max(generated, default=0))
        self._n.observe(sampling.n)
        self._max_tokens.observe(sampling.max_tokens)

    def observe_times(self, lifetime: Lifetime, trace: RequestTrace | None) -> None:
        """Record a finished request's durations, composed from the router's stamps and the
        workers' durations."""
        prefill = trace.prefill_s if trace is not None else None
        decode = lifetime.seconds(Duration.DECODE)
        waits = [lifetime.seconds(Duration.ROUTER_QUEUE)]
        if trace is not None:
            waits += [trace.reservation_wait_s, trace.prefill_queue_s]
        _observe(self._e2e, lifetime.seconds(Duration.E2E))
        _observe(self._queue, sum(wait for wait in waits if wait is not None))
        _observe(self._prefill, prefill)
        _observe(self._decode, decode)
        if decode is not None:
            _observe(self._inference, decode + (prefill or 0.0))


def _observe(histogram: Labelled, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)


class RouterMetrics(Collector):
    """All series of the HTTP side; registers itself.

    Args:
        max_model_len: bounds the buckets of token counts (1, 2, 5, 10, 20, ...).
    """

    def __init__(self, registry: CollectorRegistry, max_model_len: int) -> None:
        self._counters = CollectorRegistry()
        self._series = _Series(self._counters, _powers(max_model_len))
        self._models: dict[str, ModelMetrics] = {}
        self.num_by_state: dict[State, int] = {
            "preparing": 0,
            "waiting": 0,
            "streaming": 0,
        }
        self._http = Counter(
            "dovetail:http_responses",
            "Answers by route and status; a client that left before its answer counts as 499",
            ["route", "status"],
            registry=self._counters,
        )
        self._answered: dict[tuple[str, int], FastCounter] = {}
        self.ignored_fields = Counter(
            "dovetail:ignored_fields", "Unknown request fields that were ignored", registry=registry
        )
        gauge = Gauge(
            "dovetail:http_requests",
            "Generation requests in flight at the HTTP side; they sum to all of them",
            ["state"],
            registry=registry,
        )
        for state in self.num_by_state:
            gauge.labels(state).set_function(lambda state=state: self.num_by_state[state])
        registry.register(self)

    def of_model(self, name: str) -> ModelMetrics:
        """Return the request-level series of a model."""
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = ModelMetrics(self._series, name)
        return model

    def answered(self, route: str, status: int) -> None:
        """Count an answer; `route` is one of ours, never the client's text."""
        counter = self._answered.get((route, status))
        if counter is None:
            counter = FastCounter(self._http.labels(route, str(status)))
            self._answered[route, status] = counter
        counter.inc()

    def collect(self) -> Iterable[Metric]:
        """Yield what fast counters and histograms hold."""
        for settling in (*self._answered.values(), *self._models.values()):
            settling.settle()
        yield from self._counters.collect()
        for histogram in self._series.histograms:
            yield from histogram.collect()


class _Series:
    """vLLM's series, before labels."""

    def __init__(self, registry: CollectorRegistry, token_buckets: tuple[float, ...]) -> None:
        self.histograms: list[FastHistogram] = []
        add = self._add
        self.ttft = add("time_to_first_token_seconds", "Time to first token", _TTFT)
        self.inter_token = add(
            "inter_token_latency_seconds",
            "Time between a sample's arrivals of tokens",
            _ITL,
            older="time_per_output_token_seconds",
        )
        self.e2e = add("e2e_request_latency_seconds", "Arrival to last token", _LATENCY)
        self.queue = add("request_queue_time_seconds", "Waiting in all queues", _LATENCY)
        self.prefill = add("request_prefill_time_seconds", "Computing the prompt", _LATENCY)
        self.decode = add("request_decode_time_seconds", "First to last token", _LATENCY)
        self.inference = add("request_inference_time_seconds", "Prefill + decode", _LATENCY)
        self.prompt_tokens = add("request_prompt_tokens", "Prompt tokens", token_buckets)
        self.generation_tokens = add(
            "request_generation_tokens", "Generated tokens of all samples", token_buckets
        )
        self.max_generation_tokens = add(
            "request_max_num_generation_tokens", "Generated tokens, longest sample", token_buckets
        )
        self.n = add("request_params_n", "n", _PARAMS_N)
        self.max_tokens = add("request_params_max_tokens", "max_tokens", token_buckets)
        self.success = Counter(
            "vllm:request_success",
            "Requests that ended, by finish reason",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )

    def _add(
        self, name: str, text: str, bounds: tuple[float, ...], *, older: str | None = None
    ) -> FastHistogram:
        names = tuple(f"vllm:{one}" for one in (name, older) if one is not None)
        self.histograms.append(FastHistogram(names, text, _LABELS, bounds))
        return self.histograms[-1]


def _powers(maximum: int) -> tuple[float, ...]:
    """vLLM's `build_1_2_5_buckets`."""
    buckets: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > max(1, maximum):
                return tuple(buckets)
            buckets.append(float(mantissa * scale))
        scale *= 10
