"""Whose blocks are taken when they run out: lowest priority, then least lost work."""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduling.sequence import Sequence


def choose_victim(running: Iterable[Sequence]) -> Sequence:
    """Return the sequence to preempt by recompute. There is one: who lacks blocks is preemptible.

    Lost work is what has to be computed again; among equals the latest arrival goes.
    """
    candidates = (sequence for sequence in running if sequence.is_preemptible)
    return max(candidates, key=_expendability)


def _expendability(sequence: Sequence) -> tuple[int, int, int, int]:
    priority, arrival, sample_index = sequence.rank
    return (priority, -sequence.num_computed, arrival, sample_index)
