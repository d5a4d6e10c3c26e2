"""Block ids as runs of neighbours: the form in which they cross the wire."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from core.ids import BlockId
from core.messages import BlockRun


def block_runs(block_ids: Sequence[BlockId]) -> tuple[BlockRun, ...]:
    """Join neighbouring ids, keeping the order: 4, 5, 6, 9 gives (4, 3), (9, 1)."""
    runs: list[BlockRun] = []
    for block_id in block_ids:
        if runs and runs[-1].first + runs[-1].count == block_id:
            runs[-1] = BlockRun(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(BlockRun(block_id, 1))
    return tuple(runs)


def block_ids_of(runs: Sequence[BlockRun]) -> tuple[BlockId, ...]:
    """Undo `block_runs`."""
    ids = chain.from_iterable(range(run.first, run.first + run.count) for run in runs)
    return tuple(BlockId(block_id) for block_id in ids)
