"""How a plan's delta changes the slots of an executor, and what of it every one refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from core.ids import BlockId, SlotId
from engine.executor.interface import SlotAdded, StepPlan, refuse_adapter

SlotT = TypeVar("SlotT")


class SlotDeltas(ABC, Generic[SlotT]):
    """Slots by id, updated in place by each plan's delta.

    Args:
        num_slots: ids are below.
        max_tokens: tokens that a sequence may reach.

    Attributes:
        by_id: the slots that are there.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.by_id: dict[SlotId, SlotT] = {}
        self.max_tokens = max_tokens
        self._num_slots = num_slots

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's slots, new blocks and table edits, in this order.

        Raises:
            ValueError: a sequence has no place, or there is a second KV group; names what is wrong
                and what would be right.
        """
        for slot in plan.removed:
            del self.by_id[slot]
        for added in plan.added:
            self._check(added)
            self.by_id[added.slot] = self._make(added)
            (table,) = added.block_tables
            self._extend(added.slot, table)
        for new in plan.new_blocks:
            _check_group(new.group)
            self._extend(new.slot, new.block_ids)
        for edit in plan.table_edits:
            _check_group(edit.group)
            self._edit(edit.slot, edit.index, edit.block_id)

    @abstractmethod
    def _make(self, added: SlotAdded) -> SlotT:
        """Return a slot of a sequence, without blocks."""

    @abstractmethod
    def _extend(self, slot_id: SlotId, block_ids: Sequence[BlockId]) -> None:
        """Append blocks to a slot's table."""

    @abstractmethod
    def _edit(self, slot_id: SlotId, index: int, block_id: BlockId) -> None:
        """Let an entry of a slot's table name another block."""

    def _check(self, added: SlotAdded) -> None:
        if not 0 <= added.slot < self._num_slots or added.slot in self.by_id:
            msg = f"slot {added.slot}: must be free and below {self._num_slots}"
            raise ValueError(msg)
        if not added.num_computed < len(added.token_ids) <= self.max_tokens:
            msg = (
                f"slot {added.slot}: {len(added.token_ids)} tokens, {added.num_computed} computed; "
                f"at most {self.max_tokens} tokens, and at least one to compute"
            )
            raise ValueError(msg)
        refuse_adapter(added)


def _check_group(group: int) -> None:
    if group:
        msg = f"KV group {group}: this model has one group, 0"
        raise ValueError(msg)
