"""Free block ids as maximal runs of neighbours.

Transports merge neighbouring blocks into one descriptor, so a prompt should get a run. Best fit:
single blocks come out of the smallest run, which keeps the large ones whole.

    _end_by_start    {0: 4, 7: 9}             runs 0..3 and 7..8
    _start_by_end    {4: 0, 9: 7}             the same, for joining on the left
    _starts_by_length, _lengths               runs of one length; the lengths in order
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from core.ids import BlockId


class FreeRuns:
    """A set of block ids that gives them out in runs.

    `take` and `put` cost O(runs touched * log lengths): a pool of N blocks has at most sqrt(2 N)
    different run lengths.
    """

    def __init__(self, num_blocks: int) -> None:
        self._end_by_start: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._starts_by_length: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []
        self._num_blocks = 0
        if num_blocks:
            self._add_run(0, num_blocks)

    def __len__(self) -> int:
        """Return how many ids are free."""
        return self._num_blocks

    def __iter__(self) -> Iterator[BlockId]:
        """Iterate over the free ids, run by run."""
        for start, end in self._end_by_start.items():
            yield from map(BlockId, range(start, end))

    def take(self, count: int) -> list[BlockId]:
        """Remove `count` ids, at most `len(self)`: one run if any is long enough, else the longest
        ones first."""
        taken: list[BlockId] = []
        while len(taken) < count:
            missing = count - len(taken)
            at = bisect_left(self._lengths, missing)
            length = self._lengths[min(at, len(self._lengths) - 1)]
            start = next(iter(self._starts_by_length[length]))
            end = self._remove_run(start)
            split = min(start + missing, end)
            if split < end:
                self._add_run(split, end)
            taken.extend(map(BlockId, range(start, split)))
        return taken

    def put(self, block_ids: Iterable[BlockId]) -> None:
        """Add ids that are not in the set, joining them with their neighbours."""
        for start, end in runs_of(block_ids):
            left = self._start_by_end.get(start, start)
            if left != start:
                self._remove_run(left)
            right = self._remove_run(end) if end in self._end_by_start else end
            self._add_run(left, right)

    def _add_run(self, start: int, end: int) -> None:
        length = end - start
        self._end_by_start[start] = end
        self._start_by_end[end] = start
        starts = self._starts_by_length.get(length)
        if starts is None:
            insort(self._lengths, length)
            starts = self._starts_by_length[length] = {}
        starts[start] = None
        self._num_blocks += length

    def _remove_run(self, start: int) -> int:
        end = self._end_by_start.pop(start)
        length = end - start
        del self._start_by_end[end]
        starts = self._starts_by_length[length]
        del starts[start]
        if not starts:
            del self._starts_by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self._num_blocks -= length
        return end


def runs_of(block_ids: Iterable[BlockId]) -> Iterator[tuple[int, int]]:
    """Group ids, in any order, into (first, end) runs of neighbours."""
    start = end = -1
    for block_id in sorted(block_ids):
        if block_id == end:
            end += 1
            continue
        if start >= 0:
            yield start, end
        start, end = block_id, block_id + 1
    if start >= 0:
        yield start, end
