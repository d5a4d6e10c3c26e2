"""Rows -> tensors: positions, token ids, places in the pool, and what is sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from core.ids import SlotId
from engine.executor.interface import SlotWork
from engine.executor.slot_state import SlotState
from engine.executor.step_rows import ChunkRows, GroupRows, StepRows, padded_rows
from engine.kernels.attention_batch import AttentionBatch, Chunk, DecodeGroup
from engine.kernels.host_device import StepBuffer
from engine.kernels.paged_kv import PagedKv


class ModelTables(NamedTuple):
    """What every step of a model reads.

    Attributes:
        cos, sin: float32 [positions, head_dim], by position.
        attention_dtype: of the decode groups' bias.
        window: positions that the sliding layers see; None where there are none.
        padded: whether steps take one of few shapes; see `step_rows`.
    """

    cos: Tensor
    sin: Tensor
    attention_dtype: torch.dtype
    window: int | None
    padded: bool


class StepInputs(NamedTuple):
    """All tensors of a step, int64 on the device. An entry is one token to draw.

    Attributes:
        token_ids: [tokens].
        selected: rows whose logits are needed, or None; on a device padded with the last one.
        entries: (slot, sample index) of each entry.
        selected_of_entry: which of the selected rows an entry reads.
        gather: the same on the device; None where entry i reads selected row i.
        entry_slots, entry_num_prompt, entry_positions: see `engine.sampling.sampler.Sequences`.
        advance: how the slots without drafts move on.
    """

    rows: StepRows
    token_ids: Tensor
    batch: AttentionBatch
    selected: Tensor | None
    entries: list[tuple[SlotId, int]]
    selected_of_entry: list[int]
    gather: Tensor | None
    entry_slots: Tensor
    entry_num_prompt: Tensor
    entry_positions: Tensor
    advance: Advance

    def logits_of_entries(self, logits: Tensor) -> Tensor:
        """Return [entries, vocab_size]: a view where it can be."""
        return logits[: len(self.entries)] if self.gather is None else logits[self.gather]


class Advance(NamedTuple):
    """Slots that advance by a count known to the host.

    Attributes:
        slots, counts: each slot, and the positions that this step computes of it.
        drawn_slots, drawn_entries: the slots that get a token, and the entry that it comes from.
    """

    slots: Tensor
    counts: Tensor
    drawn_slots: Tensor
    drawn_entries: Tensor


class _Entries(NamedTuple):
    """What `StepInputs` says of entries, on the host."""

    rows: list[int]
    entries: list[tuple[SlotId, int]]
    selected: list[int]
    selected_of_entry: list[int]


def build_inputs(
    rows: StepRows,
    work: Sequence[SlotWork],
    state: SlotState,
    pool: PagedKv,
    buffer: StepBuffer,
    model: ModelTables,
) -> StepInputs:
    """Compute a step's indices; every layer reads them.

    Args:
        rows: the step.
        work: the plan's.
        state: tokens, lengths and tables of the slots.
        pool: turns block ids into places.
        buffer: takes what the host knows to the device.
        model: what depends on the model alone.
    """
    entries = _entries(rows, state)
    in_order = entries.selected_of_entry == list(range(len(entries.selected)))
    # Padded sections come first: the others' sizes then move none of them.
    (slots, offsets, selected, *rest) = buffer.copy(
        rows.slots,
        rows.offsets,
        _padded(entries.selected) if model.padded else entries.selected,
        entries.rows,
        [state.by_id[slot].num_prompt for slot, _ in entries.entries],
        () if in_order else entries.selected_of_entry,
        *_advance(work),
        *_drafts(work),
    )
    entry_rows, entry_num_prompt, gather, *rest = rest
    _write_drafts(state, *rest[4:])
    positions = state.lengths[slots] + offsets
    blocks = torch.div(positions, pool.block_size, rounding_mode="floor")
    batch = AttentionBatch(
        cos=model.cos[positions][:, None],
        sin=model.sin[positions][:, None],
        write_rows=pool.rows_at(state.tables[slots, blocks], positions % pool.block_size),
        groups=tuple(_group(group, slots, positions, state, pool, model) for group in rows.groups),
        chunks=tuple(_chunk(chunk, state, pool) for chunk in rows.chunks),
    )
    return StepInputs(
        rows=rows,
        token_ids=state.token_ids[slots, positions],
        batch=batch,
        selected=selected if entries.selected else None,
        entries=entries.entries,
        selected_of_entry=entries.selected_of_entry,
        gather=None if in_order else gather,
        entry_slots=slots[entry_rows],
        entry_num_prompt=entry_num_prompt,
        entry_positions=positions[entry_rows] + 1,
        advance=Advance(*rest[:4]),
    )


def _padded(rows: list[int]) -> list[int]:
    return rows + rows[-1:] * (padded_rows(len(rows)) - len(rows))


def _entries(rows: StepRows, state: SlotState) -> _Entries:
    found = _Entries([], [], [], [])
    for item in rows.samples:
        slot, first = item.work.slot, len(found.selected)
        found.selected.extend(item.rows)
        if item.work.drafts or item.num_samples == 1:
            found.rows.extend(item.rows)
            found.entries.extend([(slot, state.by_id[slot].sample_index)] * len(item.rows))
            found.selected_of_entry.extend(range(first, len(found.selected)))
        else:
            found.rows.extend([item.rows[0]] * item.num_samples)
            found.entries.extend((slot, index) for index in range(item.num_samples))
            found.selected_of_entry.extend([first] * item.num_samples)
    return found


def num_entries(work: SlotWork) -> int:
    """Return how many tokens are drawn for a work item."""
    if not work.num_samples:
        return 0
    return work.num_query if work.drafts else work.num_samples


def _advance(work: Sequence[SlotWork]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the sections of `Advance`.

    Of several samples of one prompt the first is the slot's own; the others become slots of their
    own when the driver adds them.
    """
    plain = [item for item in work if not item.drafts]
    firsts = accumulate(map(num_entries, work), initial=0)
    drawn = [
        (item.slot, first)
        for item, first in zip(work, firsts, strict=False)  # the last one is the end
        if item.num_samples and not item.drafts
    ]
    return (
        [item.slot for item in plain],
        [item.num_query for item in plain],
        [slot for slot, _ in drawn],
        [first for _, first in drawn],
    )


def _drafts(work: Sequence[SlotWork]) -> tuple[list[int], list[int], list[int]]:
    """Return (slot, offset from the slot's length, token) of each proposed token."""
    drafts = [
        (item.slot, offset, token)
        for item in work
        for offset, token in enumerate(item.drafts, start=1)
    ]
    return (
        [slot for slot, _, _ in drafts],
        [offset for _, offset, _ in drafts],
        [token for _, _, token in drafts],
    )


def _write_drafts(state: SlotState, slots: Tensor, offsets: Tensor, tokens: Tensor) -> None:
    """Put proposed tokens after the last known one, where the step reads its inputs."""
    if len(slots):
        state.token_ids[slots, state.lengths[slots] + offsets] = tokens


def _group(
    group: GroupRows,
    slots: Tensor,
    positions: Tensor,
    state: SlotState,
    pool: PagedKv,
    model: ModelTables,
) -> DecodeGroup:
    device = slots.device
    own_slots, own = slots[group.first : group.last], positions[group.first : group.last]
    last_block = torch.div(own, pool.block_size, rounding_mode="floor")
    wanted = torch.arange(group.num_blocks, device=device)[None]
    block_ids = state.tables[own_slots[:, None], torch.minimum(wanted, last_block[:, None])]
    steps_back = own[:, None] - torch.arange(group.num_blocks * pool.block_size, device=device)
    visible = steps_back >= 0
    dtype, window = model.attention_dtype, model.window
    return DecodeGroup(
        first=group.first,
        last=group.last,
        num_blocks=group.num_blocks,
        tiles=pool.tiles_at(block_ids),
        bias=_bias(visible, dtype),
        window_bias=None if window is None else _bias(visible & (steps_back < window), dtype),
    )


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, -math.inf)[:, None, None]


def _chunk(chunk: ChunkRows, state: SlotState, pool: PagedKv) -> Chunk:
    return Chunk(
        first=chunk.first,
        last=chunk.last,
        start=chunk.start,
        num_blocks=chunk.num_blocks,
        tiles=pool.tiles_at(state.tables[chunk.slot, : chunk.num_blocks]),
    )
