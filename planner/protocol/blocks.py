"""What every block of a run must hold, by its hash: the mock model's marks of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.block_hash import BlockHash, hash_blocks
from core.ids import BlockId
from core.kv_layout import KvLayout
from engine.executor.mock_tokens import Marks, marks_of
from engine.memory.radix_cache import RadixCache

_POISON = 0xFF


class BlockContents:
    """All full blocks that the requests of a run can come to have.

    Args:
        layout: of `mock_pool.mock_layout`: one layer, one head.
        fingerprint: the model's.
    """

    def __init__(self, layout: KvLayout, fingerprint: bytes) -> None:
        self._layout = layout
        self._fingerprint = fingerprint
        self._marks_by_hash: dict[BlockHash, Marks] = {}

    def expect(self, token_ids: Sequence[int]) -> None:
        """Take in a sequence that a worker may compute: a prompt and its oracle's tokens."""
        size = self._layout.block_size
        hashes = hash_blocks(token_ids, block_size=size, fingerprint=self._fingerprint)
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._marks_by_hash:
                start = index * size
                self._marks_by_hash[block_hash] = marks_of(token_ids[start : start + size], start)

    def cached(self, cache: RadixCache) -> dict[BlockHash, BlockId]:
        """Return what a tree holds of these blocks."""
        found = ((h, cache.block_of(h)) for h in self._marks_by_hash)
        return {block_hash: block_id for block_hash, block_id in found if block_id is not None}

    def is_complete(self, block_hash: BlockHash, memory: memoryview, block_id: BlockId) -> bool:
        """Whether a block's bytes are those of its tokens."""
        keys, values = self._tiles(memory, block_id)
        marks = self._marks_by_hash[block_hash]
        return bool((keys == marks).all() and (values == marks).all())

    def is_tail_zero(self, memory: memoryview, block_id: BlockId, num_tokens: int) -> bool:
        """Whether nothing stands behind the first `num_tokens` positions of a block."""
        layer, start = self._layout.layers[0], block_id * self._layout.block_bytes
        for tile in (layer.offset, layer.offset + layer.kv_stride):
            first = start + tile + num_tokens * layer.token_stride
            end = start + tile + self._layout.block_size * layer.token_stride
            if any(memory[first:end]):
                return False
        return True

    def poison(self, memory: memoryview, block_id: BlockId) -> None:
        """Overwrite a free block, so that nothing can live on in it."""
        size = self._layout.block_bytes
        memory[block_id * size : (block_id + 1) * size] = bytes([_POISON]) * size

    def _tiles(self, memory: memoryview, block_id: BlockId) -> tuple[Marks, Marks]:
        layer, start = self._layout.layers[0], block_id * self._layout.block_bytes
        first, second = (
            np.ndarray(
                (self._layout.block_size,),
                dtype=np.uint64,
                buffer=memory,
                offset=start + tile,
                strides=(layer.token_stride,),
            )
            for tile in (layer.offset, layer.offset + layer.kv_stride)
        )
        return first, second
