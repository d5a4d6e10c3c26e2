"""One sequence's blocks in one KV group: position p is in entry p // block_size.

Fork shares every block. Only a partial tail can be written afterwards, so copy-on-write concerns
one block: the first writers clone it, the last sharer writes in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.ids import BlockId
from engine.memory.block_pool import BlockPool


class BlockTable:
    """A list of block ids.

    Attributes:
        group: the KV group (layers that share block ids); sliding-window, hybrid and draft layers
            need their own.
        block_ids: in the order of positions.
        num_shared: how many entries at the front were taken over from others (prefix hits, a fork)
            rather than allocated; a forecast counts those once, at whoever allocated them.
        num_published: how many entries at the front are in the radix tree under this sequence's
            own prefix: prefix hits, and what `KvMemory.publish` added since.
    """

    __slots__ = ("block_ids", "block_size", "group", "num_published", "num_shared")

    def __init__(self, block_size: int, shared: Sequence[BlockId] = (), *, group: int = 0) -> None:
        self.block_size = block_size
        self.group = group
        self.block_ids: list[BlockId] = list(shared)
        self.num_shared = len(self.block_ids)
        self.num_published = self.num_shared

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.block_ids)

    @property
    def num_exclusive(self) -> int:
        """Blocks that were allocated for this table."""
        return len(self.block_ids) - self.num_shared

    def append(self, block_ids: Sequence[BlockId]) -> None:
        """Add blocks that were allocated for this table."""
        self.block_ids.extend(block_ids)

    def fork(self) -> BlockTable:
        """Return a table of the same blocks; the caller holds each once more."""
        forked = BlockTable(self.block_size, self.block_ids, group=self.group)
        forked.num_published = self.num_published
        return forked

    def num_missing(self, num_positions: int) -> int:
        """Return how many blocks are missing to hold `num_positions` positions."""
        return max(0, -(-num_positions // self.block_size) - len(self.block_ids))

    def writable_tail(self, position: int, pool: BlockPool) -> int | None:
        """Return the entry that must be cloned before `position` is written, or None.

        None where the block does not exist yet, or has no other holder (the last sharer).
        """
        index = position // self.block_size
        if index < len(self.block_ids) and pool.num_holders(self.block_ids[index]) > 1:
            return index
        return None

    def replace(self, index: int, block_id: BlockId) -> BlockId:
        """Put a clone into entry `index`; returns the block to release."""
        old = self.block_ids[index]
        self.block_ids[index] = block_id
        self.num_shared = min(self.num_shared, index)
        return old
