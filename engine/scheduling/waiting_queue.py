"""Sequences without blocks, in order of service: priority, retries before newcomers, arrival."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from engine.scheduling.sequence import Sequence

_Key = tuple[int, bool, int, int]


class WaitingQueue:
    """A sorted queue; hundreds of entries, so insertion by bisection into a list is quick."""

    def __init__(self) -> None:
        self._entries: list[tuple[_Key, Sequence]] = []

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in the order of service over a snapshot; removing while iterating is fine."""
        return iter([sequence for _, sequence in self._entries])

    def push(self, sequence: Sequence, *, at_front: bool = False) -> None:
        """Queue a sequence; `at_front`: before all newcomers of its priority (retries, preempted
        ones)."""
        priority, arrival, sample_index = sequence.rank
        key = (priority, not at_front, arrival, sample_index)
        insort(self._entries, (key, sequence), key=lambda entry: entry[0])

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        self._entries = [entry for entry in self._entries if entry[1] is not sequence]
