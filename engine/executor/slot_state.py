"""What the executor keeps of each slot: small facts on the host, tokens and tables on the device.

The device's copy is what steps read, so that "the last token of slot s" and the number of accepted
drafts need not be known to the host when the next step is launched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.ids import BlockId, SlotId
from core.kv_layout import KvLayout
from engine.executor.interface import SlotAdded
from engine.executor.slot_deltas import SlotDeltas
from engine.kernels.host_device import integers_on
from engine.sampling.slot_sampling import SlotSampling, resolve


class Slot:
    """Host facts of one sequence.

    Attributes:
        length: computed positions; an upper bound while drafts are not yet verified.
        table: block ids, as on the device.
        finite_to: positions below hold finite numbers in every block of the table: computed, or
            zeroed in the tail of a partial block.
    """

    def __init__(self, added: SlotAdded, sampling: SlotSampling) -> None:
        self.sampling = sampling
        self.sample_index = added.sample_index
        self.num_prompt = added.num_prompt
        self.return_hidden = added.return_hidden
        self.prompt_logprobs = added.prompt_logprobs
        self.length = added.num_computed
        self.finite_to = 0
        self.table: list[BlockId] = []


class SlotState(SlotDeltas[Slot]):
    """Slots by id, and what steps read of them.

    Args:
        num_slots: ids are below.
        max_tokens: tokens that a sequence may reach.
        layout: for the block size.
        device: of the tensors.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, layout: KvLayout, device: torch.device
    ) -> None:
        super().__init__(num_slots, max_tokens)
        self._device = device
        self.token_ids = torch.zeros((num_slots, max_tokens), dtype=torch.int64, device=device)
        num_blocks = layout.blocks_for(max_tokens)
        self.tables = torch.zeros((num_slots, num_blocks), dtype=torch.int64, device=device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def _make(self, added: SlotAdded) -> Slot:
        tokens = integers_on(self._device, added.token_ids)
        self.token_ids[added.slot, : len(added.token_ids)] = tokens
        self.lengths[added.slot] = added.num_computed
        return Slot(added, resolve(added.sampling, self._device))

    def _extend(self, slot_id: SlotId, block_ids: Sequence[BlockId]) -> None:
        table = self.by_id[slot_id].table
        first = len(table)
        table += block_ids
        self.tables[slot_id, first : len(table)] = integers_on(self._device, block_ids)

    def _edit(self, slot_id: SlotId, index: int, block_id: BlockId) -> None:
        self.by_id[slot_id].table[index] = block_id
        self.tables[slot_id, index] = block_id
