"""What dispatch counts, for prometheus (api.md's `dovetail:` series)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.fast_counter import FastCounter
from router.fast_histogram import FastHistogram, Labelled
from router.policy.decision import Reason

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ATTEMPTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_TPOT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class DispatchMetrics(Collector):
    """Register it once: `registry.register(dispatcher.metrics)`.

    Args:
        requests_by_state, workers_by_state: asked at each scrape.
    """

    def __init__(
        self,
        requests_by_state: Callable[[], Mapping[str, int]],
        workers_by_state: Callable[[], Mapping[str, int]],
    ) -> None:
        self._requests_by_state = requests_by_state
        self._workers_by_state = workers_by_state
        self._registry = CollectorRegistry()
        decisions = Counter(
            "dovetail:disaggregation_decisions",
            "Dispatches, by why they went where they did",
            ["reason"],
            registry=self._registry,
        )
        self._decided = {reason: FastCounter(decisions.labels(reason.value)) for reason in Reason}
        self._redispatches = Counter(
            "dovetail:redispatches",
            "Dispatches after a request's first",
            registry=self._registry,
        )
        self._twins = Counter(
            "dovetail:stale_messages",
            "Messages of dispatches that were given up, and of unknown requests",
            registry=self._registry,
        )
        self._histograms: list[FastHistogram] = []
        self._ttft = self._pair("ttft", _TTFT_BUCKETS)
        self._tpot = self._pair("tpot", _TPOT_BUCKETS)
        attempts = FastHistogram(
            ("dovetail:request_attempts",),
            "Attempts a request that ended: dispatches, and tries at a prefill within the last",
            (),
            _ATTEMPTS,
        )
        self._histograms.append(attempts)
        self._attempts = attempts.labelled(())

    def _pair(self, name: str, buckets: tuple[float, ...]) -> tuple[Labelled, Labelled]:
        predicted, actual = (
            FastHistogram(
                (f"dovetail:{kind}_{name}_seconds",),
                f"{name.upper()} of requests served by their first dispatch, {kind}",
                (),
                buckets,
            )
            for kind in ("predicted", "actual")
        )
        self._histograms += [predicted, actual]
        return predicted.labelled(()), actual.labelled(())

    def decided(self, reason: Reason, *, is_first: bool) -> None:
        """Count a dispatch."""
        self._decided[reason].inc()
        if not is_first:
            self._redispatches.inc()

    def twin_heard(self) -> None:
        """Count a message that was not taken."""
        self._twins.inc()

    def ended(self, num_attempts: int) -> None:
        """Count a request by its attempts; one that never reached a worker had none."""
        if num_attempts:
            self._attempts.observe(num_attempts)

    def attempts(self) -> dict[str, int]:
        """Return how many requests ended, how many of them in more than one attempt, and the
        attempts of all."""
        counts, total = self._attempts.read()
        return {"requests": sum(counts), "retried": sum(counts[1:]), "attempts": round(total)}

    def ttft_seen(self, predicted_s: float, actual_s: float) -> None:
        """Compare, from the dispatch to its first token."""
        self._ttft[0].observe(predicted_s)
        self._ttft[1].observe(actual_s)

    def tpot_seen(self, predicted_s: float, actual_s: float) -> None:
        """Compare, over the tokens after the first."""
        self._tpot[0].observe(predicted_s)
        self._tpot[1].observe(actual_s)

    def collect(self) -> Iterable[Metric]:
        """Yield all series; the gauges of requests sum to the requests in flight."""
        gauge = GaugeMetricFamily(
            "dovetail:requests", "Requests in flight at this router, by state", labels=["state"]
        )
        for state, count in self._requests_by_state().items():
            gauge.add_metric([state], count)
        yield gauge
        workers = GaugeMetricFamily(
            "dovetail:workers", "Workers that this router knows, by state", labels=["state"]
        )
        for state, count in self._workers_by_state().items():
            workers.add_metric([state], count)
        yield workers
        for decided in self._decided.values():
            decided.settle()
        yield from self._registry.collect()
        for histogram in self._histograms:
            yield from histogram.collect()
