"""Rows -> tensors: positions, token ids, places in the pool, and what is sampled."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from core.ids import SlotId
from engine.executor.slot_state import SlotState
from engine.executor.step_rows import ChunkRows, GroupRows, StepRows, WorkSamples
from engine.kernels.attention_batch import AttentionBatch, Chunk, DecodeGroup
from engine.kernels.paged_kv import PagedKv


class StepInputs(NamedTuple):
    """All tensors of a step, int64 on the device. An entry is one token to draw.

    Attributes:
        token_ids: [tokens].
        selected: rows whose logits are needed, or None.
        entries: (slot, sample index) of each entry.
        selected_of_entry: which of the selected rows an entry reads.
        entry_slots, entry_num_prompt, entry_positions: see `engine.sampling.sampler.Sequences`.
    """

    rows: StepRows
    token_ids: Tensor
    batch: AttentionBatch
    selected: Tensor | None
    entries: list[tuple[SlotId, int]]
    selected_of_entry: list[int]
    entry_slots: Tensor
    entry_num_prompt: Tensor
    entry_positions: Tensor


def build_inputs(
    rows: StepRows,
    state: SlotState,
    pool: PagedKv,
    rope: tuple[Tensor, Tensor],
    attention_dtype: torch.dtype,
) -> StepInputs:
    """Compute a step's indices; every layer reads them.

    Args:
        rows: the step.
        state: tokens, lengths and tables of the slots.
        pool: turns block ids into places.
        rope: tables of (cos, sin) by position.
        attention_dtype: of the decode groups' bias.
    """
    device = state.lengths.device
    slots = torch.tensor(rows.slots, dtype=torch.int64, device=device)
    offsets = torch.tensor(rows.offsets, dtype=torch.int64, device=device)
    positions = state.lengths[slots] + offsets
    blocks = torch.div(positions, pool.block_size, rounding_mode="floor")
    cos, sin = rope
    _write_drafts(rows, state)
    batch = AttentionBatch(
        cos=cos[positions][:, None],
        sin=sin[positions][:, None],
        write_rows=pool.rows_at(state.tables[slots, blocks], positions % pool.block_size),
        groups=tuple(
            _group(group, slots, positions, state, pool, attention_dtype) for group in rows.groups
        ),
        chunks=tuple(_chunk(chunk, state, pool) for chunk in rows.chunks),
    )
    entries = [entry for item in rows.samples for entry in _entries(item, state)]
    selected = [row for item in rows.samples for row in item.rows]
    entry_rows = [row for item in rows.samples for row in item.rows for _ in range(_draws(item))]
    index_of_row = {row: index for index, row in enumerate(selected)}
    entry_rows_t = torch.tensor(entry_rows, dtype=torch.int64, device=device)
    num_prompt = [state.by_id[slot].num_prompt for slot, _ in entries]
    return StepInputs(
        rows=rows,
        token_ids=state.token_ids[slots, positions],
        batch=batch,
        selected=torch.tensor(selected, device=device) if selected else None,
        entries=entries,
        selected_of_entry=[index_of_row[row] for row in entry_rows],
        entry_slots=slots[entry_rows_t],
        entry_num_prompt=torch.tensor(num_prompt, dtype=torch.int64, device=device),
        entry_positions=positions[entry_rows_t] + 1,
    )


def _draws(item: WorkSamples) -> int:
    return 1 if item.work.drafts else item.num_samples


def _entries(item: WorkSamples, state: SlotState) -> list[tuple[SlotId, int]]:
    slot = item.work.slot
    if item.work.drafts or item.num_samples == 1:
        return [(slot, state.by_id[slot].sample_index)] * len(item.rows)
    return [(slot, index) for index in range(item.num_samples)]


def _write_drafts(rows: StepRows, state: SlotState) -> None:
    """Put proposed tokens after the last known one, where the step reads its inputs."""
    for item in rows.samples:
        if item.work.drafts:
            slot, drafts = item.work.slot, item.work.drafts
            device = state.lengths.device
            places = state.lengths[slot] + torch.arange(1, len(drafts) + 1, device=device)
            state.token_ids[slot, places] = torch.tensor(drafts, device=device)


def _group(
    group: GroupRows,
    slots: Tensor,
    positions: Tensor,
    state: SlotState,
    pool: PagedKv,
    dtype: torch.dtype,
) -> DecodeGroup:
    device = slots.device
    own_slots, own = slots[group.first : group.last], positions[group.first : group.last]
    last_block = torch.div(own, pool.block_size, rounding_mode="floor")
    wanted = torch.arange(group.num_blocks, device=device)[None]
    block_ids = state.tables[own_slots[:, None], torch.minimum(wanted, last_block[:, None])]
    visible = torch.arange(group.num_blocks * pool.block_size, device=device)[None] <= own[:, None]
    bias = torch.zeros(visible.shape, dtype=dtype, device=device)
    bias.masked_fill_(~visible, -math.inf)
    return DecodeGroup(
        first=group.first,
        last=group.last,
        num_blocks=group.num_blocks,
        tiles=pool.tiles_at(block_ids),
        bias=bias[:, None, None],
    )


def _chunk(chunk: ChunkRows, state: SlotState, pool: PagedKv) -> Chunk:
    return Chunk(
        first=chunk.first,
        last=chunk.last,
        start=chunk.start,
        num_blocks=chunk.num_blocks,
        tiles=pool.tiles_at(state.tables[chunk.slot, : chunk.num_blocks]),
    )
