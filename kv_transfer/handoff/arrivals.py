"""Which blocks of one attempt have landed: the union of write notifications over all rank pairs.

Notifications of one attempt may come in any order (with two posting threads the last chunk's came
while an earlier one's bytes were missing), so completeness is a property of the union alone.
"""

from __future__ import annotations

import msgspec

RankPair = tuple[int, int]
"""(writer's rank, target's rank)."""

SINGLE_RANK: tuple[RankPair, ...] = ((0, 0),)
"""One rank on either side."""

Run = tuple[int, int]
"""Half-open range of prompt blocks."""


class Arrivals(msgspec.Struct, frozen=True):
    """The union so far.

    Attributes:
        first, end: half-open range of prompt blocks that is awaited from every rank pair.
        rank_pairs: whose writes are awaited.
        landed: per rank pair, disjoint runs in ascending order, neighbours merged.
    """

    first: int
    end: int
    rank_pairs: tuple[RankPair, ...]
    landed: dict[RankPair, tuple[Run, ...]]

    @property
    def is_complete(self) -> bool:
        """Whether every awaited block has landed from every rank pair."""
        whole = ((self.first, self.end),)
        return all(self.landed.get(pair) == whole for pair in self.rank_pairs)

    def add(self, rank_pair: RankPair, first: int, count: int) -> Arrivals:
        """Return the union with one more write; what was not awaited changes nothing."""
        start, end = max(first, self.first), min(first + count, self.end)
        if rank_pair not in self.rank_pairs or start >= end:
            return self
        merged = _merge((*self.landed.get(rank_pair, ()), (start, end)))
        return msgspec.structs.replace(self, landed={**self.landed, rank_pair: merged})


def awaiting(first: int, end: int, rank_pairs: tuple[RankPair, ...] = SINGLE_RANK) -> Arrivals:
    """Return the empty union that awaits prompt blocks `first` to `end` - 1, at least one."""
    return Arrivals(first=first, end=end, rank_pairs=rank_pairs, landed={})


NOTHING_AWAITED = awaiting(0, 0)
"""Never complete: no run of it is empty and awaited."""


def _merge(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    merged: list[Run] = []
    for start, end in sorted(runs):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)
