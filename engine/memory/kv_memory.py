"""One rank's KV memory in one group: the block pool and the radix cache, changed together.

Who holds what: a sequence holds every block of its table once. A block in the radix tree whose last
holder lets go stays there, cached, until space is needed. A full block enters the tree when its
holder publishes it, if its prefix is not there yet (insert if absent).
"""

from __future__ import annotations

from collections.abc import Sequence

from core.block_hash import ROOT, BlockHash, hash_blocks
from core.ids import BlockId
from engine.memory.block_pool import BlockPool
from engine.memory.block_table import BlockTable
from engine.memory.radix_cache import RadixCache


class KvMemory:
    """Accounting of `num_blocks` blocks of `block_size` positions.

    Args:
        fingerprint: the model's, part of every block hash; equal on all workers and routers.
    """

    def __init__(self, num_blocks: int, block_size: int, fingerprint: bytes) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache()
        self.block_size = block_size
        self._fingerprint = fingerprint

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated or reserved now: free ones, and cached ones by eviction."""
        return self.pool.num_free + self.pool.num_cached

    def extend_hashes(
        self, hashes: list[BlockHash], token_ids: Sequence[int], namespace: bytes
    ) -> None:
        """Append the hashes of the full blocks of `token_ids` that `hashes` lacks."""
        start = len(hashes) * self.block_size
        if len(token_ids) - start < self.block_size:
            return
        hashes.extend(
            hash_blocks(
                token_ids[start:],
                block_size=self.block_size,
                fingerprint=self._fingerprint,
                namespace=namespace,
                parent=hashes[-1] if hashes else ROOT,
            )
        )

    def num_reusable(self, num_tokens: int) -> int:
        """Return how many blocks of `num_tokens` tokens may come from the cache: a token is left
        to compute, so that a shared block is never written."""
        return (num_tokens - 1) // self.block_size

    def match(self, hashes: Sequence[BlockHash], num_tokens: int) -> list[BlockId]:
        """Return the cached blocks of a prefix of `num_tokens` tokens, at most `num_reusable`."""
        return self.cache.match(hashes[: self.num_reusable(num_tokens)])

    def holds_prefix(self, hashes: Sequence[BlockHash], num_blocks: int) -> bool:
        """Whether `match` would find the first `num_blocks`, at least one; O(1), since a block in
        the tree has its whole prefix there."""
        return num_blocks > 0 and self.cache.block_of(hashes[num_blocks - 1]) is not None

    def num_idle(self, block_ids: Sequence[BlockId]) -> int:
        """Return how many of these nobody holds: holding them takes that many from
        `num_available`."""
        return sum(not self.pool.num_holders(block_id) for block_id in block_ids)

    def hold(self, block_ids: Sequence[BlockId]) -> None:
        """Hold matched or owned blocks once more."""
        self.pool.hold(block_ids)
        self.cache.hold(block_ids)

    def allocate(self, count: int) -> list[BlockId]:
        """Return `count` owned blocks, at most `num_available`; evicts as needed."""
        self._make_room(count)
        return self.pool.allocate(count)

    def reserve(self, count: int) -> list[BlockId]:
        """Return `count` reserved blocks, at most `num_available`; evicts as needed."""
        self._make_room(count)
        return self.pool.reserve(count)

    def publish(self, hashes: Sequence[BlockHash], table: BlockTable) -> None:
        """Make a holder's computed full blocks matchable, as far as the prefix is its own.

        Goes on where the last call for this table ended: those blocks are held, so still there.
        Where another block already holds a part of the prefix, the rest waits for `release`:
        below a block that the holder does not hold, it could outlive its parent.

        Args:
            hashes: of all of the table's computed full blocks, from the first on.
        """
        for index in range(table.num_published, len(hashes)):
            block_hash, block_id = hashes[index], table.block_ids[index]
            present = self.cache.block_of(block_hash)
            if present is None:
                self.cache.insert(block_hash, hashes[index - 1] if index else ROOT, block_id)
            elif present != block_id:
                return
            table.num_published = index + 1

    def release(self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> None:
        """Let go of a table; its full blocks `hashes` (computed, from the first on) become
        matchable."""
        self._publish_last(hashes, block_ids)
        self.cache.let_go(self.pool.release(block_ids, self.cache))

    def check_invariants(self) -> None:
        """Assert pool and cache alone, and that cached means idle in the tree."""
        self.pool.check_invariants()
        self.cache.check_invariants()
        assert len(self.cache) >= self.pool.num_cached

    def _publish_last(self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> None:
        parent, is_own_prefix = ROOT, True
        for block_hash, block_id in zip(hashes, block_ids, strict=False):
            present = self.cache.block_of(block_hash)
            if present is None:
                # A block that others keep holding needs a prefix that they hold too; those are
                # the blocks of this table, which a fork shares.
                if not is_own_prefix and self.pool.num_holders(block_id) > 1:
                    return
                self.cache.insert(block_hash, parent, block_id)
            elif present != block_id:
                is_own_prefix = False
            parent = block_hash

    def _make_room(self, count: int) -> None:
        self.pool.evict(self.cache.evict(count - self.pool.num_free))
