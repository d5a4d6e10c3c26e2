"""The mock executor, telling which blocks its steps write before they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.ids import BlockId
from engine.executor.interface import SlotResult, SlotWork
from engine.executor.mock_executor import MockExecutor


class SimExecutor(MockExecutor):
    """A `MockExecutor` that can be listened to.

    Attributes:
        on_write: called with the blocks that a work item writes KV to.
    """

    on_write: Callable[[list[BlockId]], None]

    def _run(self, work: SlotWork, mask: Any) -> SlotResult:
        slot, size = self._slots[work.slot], self.layout.block_size
        first, end = slot.num_computed // size, (slot.num_computed + work.num_query - 1) // size + 1
        self.on_write(slot.tables[0][first:end])
        return super()._run(work, mask)
