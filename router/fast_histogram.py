"""A histogram for what is observed a dozen times a request and once a token: an append. Many are
then sorted into their buckets at once; there is no lock.

prometheus_client's takes a lock and walks its buckets (some microseconds). All observations are
made on the event loop's thread, and a scrape reads there too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric

_MAX_UNSORTED = 256


class Labelled:
    """One label combination's counts."""

    __slots__ = ("_bounds", "_counts", "_total", "_unsorted")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._unsorted: list[float] = []

    def observe(self, value: float) -> None:
        """Count a value; one equal to a bound belongs below it (`le`)."""
        self._unsorted.append(value)
        if len(self._unsorted) >= _MAX_UNSORTED:
            self._sort()

    def read(self) -> tuple[Sequence[int], float]:
        """Return the count of each bucket and the sum of the values."""
        self._sort()
        return self._counts, self._total

    def _sort(self) -> None:
        bounds, counts = self._bounds, self._counts
        for value in self._unsorted:
            counts[bisect_left(bounds, value)] += 1
        self._total += sum(self._unsorted)
        self._unsorted.clear()


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
                counts, total = held.read()
                cumulative = itertools.accumulate(counts)
                buckets = [
                    (bound, float(count)) for bound, count in zip(bounds, cumulative, strict=True)
                ]
                metric.add_metric(labels, buckets, total)
            yield metric
