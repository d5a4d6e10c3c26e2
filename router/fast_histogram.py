"""A histogram for what is observed a dozen times a request and once a token: a bisection and two
additions, no lock.

prometheus_client's takes a lock and walks its buckets (some microseconds). All observations are
made on the event loop's thread, and a scrape reads there too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client.core import HistogramMetricFamily, Metric


class Labelled:
    """One label combination's counts."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; one equal to a bound belongs below it (`le`)."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class FastHistogram:
    """One measurement, published under one or several names.

    Args:
        bounds: ascending upper bounds; +Inf is added.
    """

    def __init__(
        self, names: tuple[str, ...], text: str, labels: tuple[str, ...], bounds: tuple[float, ...]
    ) -> None:
        self._names = names
        self._text = text
        self._label_names = labels
        self._bounds = bounds
        self._by_labels: dict[tuple[str, ...], Labelled] = {}

    def labelled(self, labels: tuple[str, ...]) -> Labelled:
        """Return the counts of these label values."""
        return self._by_labels.setdefault(labels, Labelled(self._bounds))

    def collect(self) -> Iterable[Metric]:
        """Yield one metric a name."""
        bounds = [*(str(bound) for bound in self._bounds), "+Inf"]
        for name in self._names:
            metric = HistogramMetricFamily(name, self._text, labels=self._label_names)
            for labels, held in self._by_labels.items():
                cumulative = itertools.accumulate(held.counts)
                buckets = [
                    (bound, float(count)) for bound, count in zip(bounds, cumulative, strict=True)
                ]
                metric.add_metric(labels, buckets, held.total)
            yield metric
