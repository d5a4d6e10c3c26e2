"""Which rows a step computes and in what order: plain lists from a plan, before any tensor.

Work items of one query token, and drafts, are decode rows: they come first, longest context first,
in groups whose padding stays under half. Chunks follow in the plan's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from core.ids import SlotId
from engine.executor.interface import SlotWork

_FREE_PADDING_BLOCKS = 8  # so little padding is cheaper than another group's kernel launches


class GroupRows(NamedTuple):
    """Decode rows [first, last) and the blocks that the longest of them needs."""

    first: int
    last: int
    num_blocks: int


class ChunkRows(NamedTuple):
    """Rows [first, last) of one slot, from position `start`."""

    slot: SlotId
    first: int
    last: int
    start: int
    num_blocks: int


class WorkSamples(NamedTuple):
    """What is sampled for one work item.

    Attributes:
        rows: the rows whose logits are used: one; or one a draft token and one more.
        num_samples: tokens drawn from each row: more than one only where there is one row.
    """

    work: SlotWork
    rows: Sequence[int]
    num_samples: int


class StepRows(NamedTuple):
    """All rows of a step.

    Attributes:
        slots, offsets: one a row; the row's position is its slot's computed length plus the offset.
        longest: an upper bound of the tokens known of any slot at work, after this step.
        samples: in the order of the plan's work, items that sample nothing left out.
    """

    slots: list[int]
    offsets: list[int]
    groups: list[GroupRows]
    chunks: list[ChunkRows]
    samples: list[WorkSamples]
    longest: int


def is_decode(work: SlotWork) -> bool:
    """Whether a work item is computed with the decode rows."""
    return work.num_query == 1 or bool(work.drafts)


def arrange(work: Sequence[SlotWork], lengths: Mapping[SlotId, int], block_size: int) -> StepRows:
    """Lay out a step.

    Args:
        work: the plan's.
        lengths: computed length of each slot; an upper bound where drafts are not yet verified.
        block_size: positions a block.
    """
    decodes = [item for item in work if is_decode(item)]
    decodes.sort(key=lambda item: -(lengths[item.slot] + item.num_query))
    chunks = [item for item in work if not is_decode(item)]
    slots: list[int] = []
    offsets: list[int] = []
    first_row: dict[SlotId, int] = {}
    for item in (*decodes, *chunks):
        first_row[item.slot] = len(slots)
        slots += [item.slot] * item.num_query
        offsets += range(item.num_query)

    def blocks(item: SlotWork) -> int:
        return -(-(lengths[item.slot] + item.num_query) // block_size)

    return StepRows(
        slots=slots,
        offsets=offsets,
        groups=_groups([(item.num_query, blocks(item)) for item in decodes]),
        chunks=[
            ChunkRows(
                slot=item.slot,
                first=first_row[item.slot],
                last=first_row[item.slot] + item.num_query,
                start=lengths[item.slot],
                num_blocks=blocks(item),
            )
            for item in chunks
        ],
        samples=[_samples(item, first_row[item.slot]) for item in work if item.num_samples],
        longest=max((lengths[item.slot] + item.num_query for item in work), default=0),
    )


def _groups(rows_and_blocks: Sequence[tuple[int, int]]) -> list[GroupRows]:
    """Group items, given as (rows, blocks) in descending order of blocks."""
    groups: list[GroupRows] = []
    row = 0
    for num_rows, num_blocks in rows_and_blocks:
        last = groups[-1] if groups else None
        if last and _fits(num_blocks, last.num_blocks):
            groups[-1] = last._replace(last=row + num_rows)
        else:
            groups.append(GroupRows(row, row + num_rows, num_blocks))
        row += num_rows
    return groups


def _fits(num_blocks: int, longest: int) -> bool:
    return 2 * num_blocks >= longest or longest - num_blocks <= _FREE_PADDING_BLOCKS


def _samples(item: SlotWork, first_row: int) -> WorkSamples:
    last_row = first_row + item.num_query
    rows = range(first_row, last_row) if item.drafts else range(last_row - 1, last_row)
    return WorkSamples(item, rows, item.num_samples)
