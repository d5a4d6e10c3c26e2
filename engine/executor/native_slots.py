"""What the native executor keeps of each slot: tokens and tables as the library reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core.ids import BlockId, SlotId
from core.kv_layout import KvLayout
from engine.executor.interface import SlotAdded
from engine.executor.native_sampling import SampledSequence, address_of, resolve
from engine.executor.slot_deltas import SlotDeltas
from engine.kernels.cpu.abi import DrawItem, Slots, StepInputs

Integers = npt.NDArray[np.int32]


class NativeSlot:
    """One sequence.

    Attributes:
        sequence: its tokens and sampling, for draws.
        is_plain: as of the sequence; asked at every token.
        num_blocks: in its table.
    """

    def __init__(self, added: SlotAdded, sequence: SampledSequence) -> None:
        self.slot = added.slot
        self.sequence = sequence
        self.num_prompt = added.num_prompt
        self.is_plain = sequence.is_plain
        self.return_hidden = added.return_hidden
        self.prompt_logprobs = added.prompt_logprobs
        self.num_blocks = 0


class NativeSlots(SlotDeltas[NativeSlot]):
    """Slots by id, and what the library reads of them.

    Args:
        num_slots: ids are below.
        max_tokens: tokens that a sequence may reach.
        layout: for the block size.
        vocab_size: of the model.

    Attributes:
        token_ids: int32 [num_slots, max_tokens].
        tables: int32 [num_slots, blocks], block ids.
        lengths: int32 [num_slots], computed positions; the library moves them on.
    """

    def __init__(self, num_slots: int, max_tokens: int, layout: KvLayout, vocab_size: int) -> None:
        super().__init__(num_slots, max_tokens)
        self._vocab_size = vocab_size
        self.token_ids: Integers = np.zeros((num_slots, max_tokens), np.int32)
        self.tables: Integers = np.zeros((num_slots, layout.blocks_for(max_tokens)), np.int32)
        self.lengths: Integers = np.zeros(num_slots, np.int32)
        self._draws: Any = (DrawItem * num_slots)()

    def inputs(self) -> StepInputs:
        """Return what is the same for all steps of these slots."""
        slots = Slots(
            token_ids=address_of(self.token_ids),
            tokens_ld=self.token_ids.shape[1],
            tables=address_of(self.tables),
            tables_ld=self.tables.shape[1],
            lengths=address_of(self.lengths),
            draws=ctypes.addressof(self._draws),
        )
        return StepInputs(slots=slots)

    def length_of(self, slot: SlotId) -> int:
        """Return a slot's computed positions."""
        return int(self.lengths[slot])

    def propose(self, slot: SlotId, drafts: Sequence[int]) -> None:
        """Write drafts behind a slot's last token."""
        first = self.length_of(slot) + 1
        self.token_ids[slot, first : first + len(drafts)] = drafts

    def _make(self, added: SlotAdded) -> NativeSlot:
        tokens = self.token_ids[added.slot]
        tokens[: len(added.token_ids)] = added.token_ids
        sampling = resolve(added.sampling, self._vocab_size)
        sequence = SampledSequence(sampling, tokens, added.num_prompt, added.sample_index)
        self.lengths[added.slot] = added.num_computed
        self._draws[added.slot] = sequence.item
        return NativeSlot(added, sequence)

    def _extend(self, slot_id: SlotId, block_ids: Sequence[BlockId]) -> None:
        slot = self.by_id[slot_id]
        end = slot.num_blocks + len(block_ids)
        self.tables[slot_id, slot.num_blocks : end] = block_ids
        slot.num_blocks = end

    def _edit(self, slot_id: SlotId, index: int, block_id: BlockId) -> None:
        self.tables[slot_id, index] = block_id
