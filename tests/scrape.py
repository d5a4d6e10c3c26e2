"""What a process's `/metrics` says, as tests ask for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

BLOCK_STATES = ("free", "cached", "owned", "reserved", "quarantined")
IN_USE = ("owned", "reserved", "quarantined")


class Scrape:
    """One reading of one process's series; the time series of one name by their labels."""

    def __init__(self, text: str) -> None:
        self._by_name: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._by_name[sample.name].append((sample.labels, sample.value))

    @classmethod
    def of(cls, http: httpx.Client, url: str) -> Scrape:
        """Read `url`/metrics."""
        answer = http.get(f"{url}/metrics")
        answer.raise_for_status()
        return cls(answer.text)

    @property
    def names(self) -> frozenset[str]:
        """Names of all samples: a counter's ends with `_total`, a histogram has three."""
        return frozenset(self._by_name)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the series with these labels; 0 where there is none."""
        return sum(
            value
            for its_labels, value in self._by_name.get(name, [])
            if labels.items() <= its_labels.items()
        )

    def labels(self, name: str) -> list[Mapping[str, str]]:
        """Return the labels of each series of this name."""
        return [its_labels for its_labels, _ in self._by_name.get(name, [])]

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the sums by the values of one label."""
        sums: dict[str, float] = defaultdict(float)
        for its_labels, value in self._by_name.get(name, []):
            sums[its_labels[label]] += value
        return dict(sums)

    @property
    def blocks(self) -> dict[str, int]:
        """A worker's KV blocks by state, and `total`, what its pool was made with."""
        states = self.by_label("dovetail:blocks", "state")
        blocks = {state: int(states[state]) for state in BLOCK_STATES}
        config = self.labels("vllm:cache_config_info")[0]
        return {**blocks, "total": int(config["num_gpu_blocks"])}


def total_over(scrapes: Iterable[Scrape], name: str, **labels: str) -> float:
    """Return a series' sum over processes."""
    return sum(scrape.total(name, **labels) for scrape in scrapes)
