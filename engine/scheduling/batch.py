"""The running sequences, in order of service, and the executor's slots that they sit in."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heappop, heappush

from core.ids import SlotId
from engine.scheduling.plan_builder import PlanBuilder
from engine.scheduling.sequence import Phase, Sequence


class Batch:
    """Sequences that have blocks. With more of them than slots, the first in order are seated
    first; nobody is unseated but by leaving."""

    def __init__(self, max_slots: int, plan: PlanBuilder) -> None:
        self._plan = plan
        self._sequences: list[Sequence] = []
        self._free_slots = [SlotId(slot) for slot in range(max_slots)]
        self.max_slots = max_slots

    def __len__(self) -> int:
        """Return the number of running sequences."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in order of service over a snapshot."""
        return iter(tuple(self._sequences))

    @property
    def num_seats(self) -> int:
        """Slots that the running sequences need, forks to come included."""
        return sum(sequence.num_seats for sequence in self._sequences)

    def join(self, sequence: Sequence) -> None:
        """A sequence got its blocks."""
        sequence.phase = Phase.RUNNING
        insort(self._sequences, sequence, key=lambda other: other.rank)

    def has_seat_for(self, sequence: Sequence) -> bool:
        """Whether the sequence has a slot or could get one."""
        return sequence.slot is not None or bool(self._free_slots)

    def seat(self, sequence: Sequence) -> SlotId:
        """Return the sequence's slot, giving it a free one if it has none. Its work must be in
        the same plan: a slot that is added stays until a later plan removes it."""
        if sequence.slot is None:
            sequence.slot = heappop(self._free_slots)
            self._plan.add(sequence, sequence.slot)
        return sequence.slot

    def leave(self, sequence: Sequence) -> None:
        """A sequence goes, and its slot with the next plan."""
        self._sequences.remove(sequence)
        if sequence.slot is not None:
            self._plan.remove(sequence.slot)
            heappush(self._free_slots, sequence.slot)
            sequence.slot = None

    def check_invariants(self) -> None:
        """Assert that slots are free or have one sequence, and that all are running."""
        seated = [s.slot for s in self._sequences if s.slot is not None]
        assert sorted(seated + self._free_slots) == list(range(self.max_slots))
        assert all(s.phase is Phase.RUNNING for s in self._sequences)
        assert [s.rank for s in self._sequences] == sorted(s.rank for s in self._sequences)
