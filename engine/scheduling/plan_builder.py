"""Collects one StepPlan's delta. What is not submitted yet (slots that went) stays for the next."""

from __future__ import annotations

from core.ids import BlockId, SlotId
from engine.executor.interface import (
    BlockCopy,
    NewBlocks,
    SlotAdded,
    SlotWork,
    StepPlan,
    TableEdit,
)
from engine.scheduling.sequence import Pending, Sequence


class PlanBuilder:
    """The lists of a plan in the making.

    Attributes:
        assigned: the sequence behind each work item, in order.
    """

    def __init__(self) -> None:
        self._number = 0
        self._removed: list[SlotId] = []
        self._clear()

    @property
    def number(self) -> int:
        """The number of the plan in the making."""
        return self._number

    @property
    def num_copies(self) -> int:
        """Blocks that it copies."""
        return len(self._copies)

    def remove(self, slot: SlotId) -> None:
        """A sequence leaves the batch."""
        self._removed.append(slot)

    def add(self, sequence: Sequence, slot: SlotId) -> None:
        """A sequence enters the batch with its table as it is now."""
        sampling = sequence.run.request.sampling
        is_scored = sequence.run.next_scored is not None
        self._added.append(
            SlotAdded(
                slot=slot,
                token_ids=tuple(sequence.token_ids),
                num_prompt=sequence.run.num_prompt,
                num_computed=sequence.num_computed,
                block_tables=(tuple(sequence.block_ids),),
                sampling=sampling,
                sample_index=sequence.sample_index,
                prompt_logprobs=sampling.prompt_logprobs if is_scored else None,
            )
        )

    def append_blocks(self, slot: SlotId, group: int, block_ids: list[BlockId]) -> None:
        """A slot's table grows by fresh blocks, which are partial as yet: zeroed."""
        self._new_blocks.append(NewBlocks(slot, group, tuple(block_ids)))
        self.zero(block_ids)

    def zero(self, block_ids: list[BlockId]) -> None:
        """Blocks for a partial tail are zeroed before use."""
        self._zeroes.extend(block_ids)

    def clone(self, edit: TableEdit, source: BlockId) -> None:
        """A slot's table entry becomes a copy of the block that it shared."""
        self._table_edits.append(edit)
        self._copies.append(BlockCopy(source, edit.block_id))

    def work(self, sequence: Sequence, work: SlotWork) -> None:
        """A slot computes; the sequence counts it as pending."""
        self._work.append(work)
        self.assigned.append(sequence)
        max_tokens = 1 + len(work.drafts) if work.num_samples else 0
        sequence.pending.append(Pending(work.num_query, max_tokens))

    def build(self) -> StepPlan | None:
        """Return the plan and start the next; None, keeping all, where nothing computes."""
        if not self._work:
            return None
        plan = StepPlan(
            number=self._number,
            removed=tuple(self._removed),
            added=tuple(self._added),
            new_blocks=tuple(self._new_blocks),
            table_edits=tuple(self._table_edits),
            zeroes=tuple(self._zeroes),
            copies=tuple(self._copies),
            work=tuple(self._work),
        )
        self._number += 1
        self._removed.clear()
        self._clear()
        return plan

    def _clear(self) -> None:
        self._added: list[SlotAdded] = []
        self._new_blocks: list[NewBlocks] = []
        self._table_edits: list[TableEdit] = []
        self._zeroes: list[BlockId] = []
        self._copies: list[BlockCopy] = []
        self._work: list[SlotWork] = []
        self.assigned: list[Sequence] = []
