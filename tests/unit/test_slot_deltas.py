"""What a plan's delta does to an executor's slots, and what every executor refuses of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from core.ids import BlockId, SlotId
from core.sampling_params import SamplingParams
from engine.executor.interface import NewBlocks, SlotAdded, StepPlan, TableEdit
from engine.executor.slot_deltas import SlotDeltas


class Tables(SlotDeltas[list[BlockId]]):
    """Slots that are their tables."""

    def _make(self, added: SlotAdded) -> list[BlockId]:
        return []

    def _extend(self, slot_id: SlotId, block_ids: Sequence[BlockId]) -> None:
        self.by_id[slot_id] += block_ids

    def _edit(self, slot_id: SlotId, index: int, block_id: BlockId) -> None:
        self.by_id[slot_id][index] = block_id


def added(slot: int = 0, num_tokens: int = 4, num_computed: int = 0) -> SlotAdded:
    return SlotAdded(
        slot=SlotId(slot),
        token_ids=tuple(range(num_tokens)),
        num_prompt=num_tokens,
        num_computed=num_computed,
        block_tables=((BlockId(7),),),
        sampling=SamplingParams(),
    )


@pytest.fixture
def slots() -> Tables:
    """Two, of at most 8 tokens; slot 1 is taken."""
    slots = Tables(num_slots=2, max_tokens=8)
    slots.apply(StepPlan(0, added=(added(slot=1),)))
    return slots


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (added(slot=2), "slot 2: must be free and below 2"),
        (added(slot=-1), "slot -1: must be free and below 2"),
        (added(slot=1), "slot 1: must be free and below 2"),
        (added(num_tokens=9), "slot 0: 9 tokens, 0 computed; at most 8 tokens"),
        (added(num_computed=4), "slot 0: 4 tokens, 4 computed; .* at least one to compute"),
    ],
)
def test_a_sequence_without_a_place_is_refused(slots: Tables, wrong: SlotAdded, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        slots.apply(StepPlan(1, added=(wrong,)))


def test_a_sequence_that_has_one_is_not(slots: Tables) -> None:
    slots.apply(StepPlan(1, added=(added(num_tokens=8, num_computed=7),)))
    assert slots.by_id == {SlotId(0): [7], SlotId(1): [7]}


def test_a_delta_is_applied_in_its_order(slots: Tables) -> None:
    """The removed slot's id is free again, and an edit finds what was appended."""
    slot = SlotId(1)
    plan = StepPlan(
        1,
        removed=(slot,),
        added=(added(slot=1),),
        new_blocks=(NewBlocks(slot, 0, (BlockId(8), BlockId(9))),),
        table_edits=(TableEdit(slot, 0, 2, BlockId(3)),),
    )
    slots.apply(plan)
    assert slots.by_id == {slot: [7, 8, 3]}


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(1, new_blocks=(NewBlocks(SlotId(1), 1, ()),)),
        StepPlan(1, table_edits=(TableEdit(SlotId(1), 1, 0, BlockId(3)),)),
    ],
)
def test_there_is_one_kv_group(slots: Tables, plan: StepPlan) -> None:
    with pytest.raises(ValueError, match="KV group 1: this model has one group, 0"):
        slots.apply(plan)
