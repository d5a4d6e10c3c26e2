"""Which rows a step computes and in what order: plain lists from a plan, before any tensor.

Work items of one query token, and drafts, are decode rows: they come first, longest context first,
in groups whose padding stays under half. Chunks follow in the plan's order.

Padded for a device, they are one group of a few sizes: rows to a power of two, by repeating the
last (which computes and writes again what it does), context to at most a quarter more blocks. So a
step of decodes comes in few shapes, and each can be captured once as a CUDA graph.
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
    rows: range
    num_samples: int


class StepRows(NamedTuple):
    """All rows of a step.

    Attributes:
        slots, offsets: one a row; the row's position is its slot's computed length plus the offset.
        by_work: each work item's rows, in the order of the plan.
        longest: an upper bound of the tokens known of any slot at work, after this step.
        samples: in the order of the plan's work, items that sample nothing left out.
    """

    slots: list[int]
    offsets: list[int]
    by_work: list[range]
    groups: list[GroupRows]
    chunks: list[ChunkRows]
    samples: list[WorkSamples]
    longest: int


def is_decode(work: SlotWork) -> bool:
    """Whether a work item is computed with the decode rows."""
    return work.num_query == 1 or bool(work.drafts)


def padded_rows(num_rows: int) -> int:
    """Return the power of two that holds so many rows."""
    return 1 << max(0, num_rows - 1).bit_length()


def padded_blocks(num_blocks: int) -> int:
    """Return the next of at most four sizes an octave."""
    step = 1 << max(0, num_blocks.bit_length() - 3)
    return -(-num_blocks // step) * step


def arrange(
    work: Sequence[SlotWork],
    lengths: Mapping[SlotId, int],
    block_size: int,
    *,
    padded: bool = False,
) -> StepRows:
    """Lay out a step.

    Args:
        work: the plan's.
        lengths: computed length of each slot; an upper bound where drafts are not yet verified.
        block_size: positions a block.
        padded: whether decode rows take one of few shapes.
    """
    decodes = [item for item in work if is_decode(item)]
    decodes.sort(key=lambda item: -(lengths[item.slot] + item.num_query))
    chunks = [item for item in work if not is_decode(item)]
    slots: list[int] = []
    offsets: list[int] = []
    rows_of: dict[SlotId, range] = {}

    def lay_out(items: Sequence[SlotWork]) -> None:
        for item in items:
            rows_of[item.slot] = range(len(slots), len(slots) + item.num_query)
            slots.extend([item.slot] * item.num_query)
            offsets.extend(range(item.num_query))

    def blocks(item: SlotWork) -> int:
        return -(-(lengths[item.slot] + item.num_query) // block_size)

    lay_out(decodes)
    if padded and decodes:
        missing = padded_rows(len(slots)) - len(slots)
        slots += slots[-1:] * missing
        offsets += offsets[-1:] * missing
        groups = [GroupRows(0, len(slots), padded_blocks(blocks(decodes[0])))]
    else:
        groups = _groups([(item.num_query, blocks(item)) for item in decodes])
    lay_out(chunks)
    return StepRows(
        slots=slots,
        offsets=offsets,
        by_work=[rows_of[item.slot] for item in work],
        groups=groups,
        chunks=[
            ChunkRows(
                slot=item.slot,
                first=rows_of[item.slot].start,
                last=rows_of[item.slot].stop,
                start=lengths[item.slot],
                num_blocks=blocks(item),
            )
            for item in chunks
        ],
        samples=[_samples(item, rows_of[item.slot]) for item in work if item.num_samples],
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


def _samples(item: SlotWork, rows: range) -> WorkSamples:
    return WorkSamples(item, rows if item.drafts else rows[-1:], item.num_samples)
