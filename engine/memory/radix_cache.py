"""The tree of full blocks, matched by prefix and evicted leaf-first, least recently used.

A block hash is chained, so it names its whole prefix, and one dictionary is the tree: the path to a
node is the list of hashes of its prefix (RadixAttention, Zheng et al. 2024, on fixed-size blocks).
Namespaces (adapter, tenant, salt) are part of the hash.

A node is *held* while a sequence owns its block. Holders hold whole prefixes, so a held node's
ancestors are held, and everything below an idle node is idle: every idle block can be evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from core.block_hash import ROOT, BlockHash
from core.ids import BlockId


class _Node:
    __slots__ = ("block_hash", "block_id", "is_held", "last_used", "num_children", "parent")

    def __init__(self, block_hash: BlockHash, block_id: BlockId, parent: _Node | None) -> None:
        self.block_hash = block_hash
        self.block_id = block_id
        self.parent = parent
        self.num_children = 0
        self.is_held = True
        self.last_used = 0

    def is_evictable(self) -> bool:
        return not (self.is_held or self.num_children)


class RadixCache:
    """Which block holds the KV of which prefix. Owns no blocks: `BlockPool` says who does."""

    def __init__(self) -> None:
        self._node_by_hash: dict[BlockHash, _Node] = {}
        self._node_by_block: dict[BlockId, _Node] = {}
        # (last use, entry number, node): lazy, an entry counts only while it still describes its
        # node. Several entries for one node are harmless.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._num_uses = 0
        self._num_entries = 0
        self._stored: list[BlockHash] = []
        self._evicted: list[BlockHash] = []

    def __len__(self) -> int:
        """Return how many blocks can be matched."""
        return len(self._node_by_hash)

    def __contains__(self, block_id: object) -> bool:
        """Whether a block can be matched."""
        return block_id in self._node_by_block

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the blocks of the longest known prefix of `hashes`; changes nothing."""
        matched: list[BlockId] = []
        for block_hash in hashes:
            node = self._node_by_hash.get(block_hash)
            if node is None:
                break
            matched.append(node.block_id)
        return matched

    def block_of(self, block_hash: BlockHash) -> BlockId | None:
        """Return the block that holds a prefix, or None."""
        node = self._node_by_hash.get(block_hash)
        return None if node is None else node.block_id

    def insert(self, block_hash: BlockHash, parent: BlockHash, block_id: BlockId) -> None:
        """Add an absent, held, fully computed block below its parent (`ROOT`: a first block)."""
        assert block_hash not in self._node_by_hash
        assert block_id not in self._node_by_block
        above = None if parent == ROOT else self._node_by_hash[parent]
        node = _Node(block_hash, block_id, above)
        if above is not None:
            above.num_children += 1
        self._node_by_hash[block_hash] = node
        self._node_by_block[block_id] = node
        self._stored.append(block_hash)

    def hold(self, block_ids: Iterable[BlockId]) -> None:
        """Protect blocks from eviction; those not in the tree are ignored."""
        for block_id in block_ids:
            node = self._node_by_block.get(block_id)
            if node is not None:
                node.is_held = True

    def let_go(self, block_ids: Iterable[BlockId]) -> None:
        """Make blocks evictable; this is their latest use."""
        self._num_uses += 1
        nodes = [self._node_by_block[block_id] for block_id in block_ids]
        for node in nodes:
            node.is_held = False
            node.last_used = self._num_uses
        for node in nodes:
            self._offer(node)
        if len(self._leaves) > 2 * len(self) + 64:
            self._forget_stale_entries()

    def evict(self, count: int) -> list[BlockId]:
        """Forget up to `count` idle blocks, the least recently used leaf first; O(log n) each."""
        evicted: list[BlockId] = []
        while self._leaves and len(evicted) < count:
            last_used, _, node = heappop(self._leaves)
            if not self._is_current(node, last_used):
                continue
            del self._node_by_hash[node.block_hash]
            del self._node_by_block[node.block_id]
            evicted.append(node.block_id)
            self._evicted.append(node.block_hash)
            if node.parent is not None:
                node.parent.num_children -= 1
                self._offer(node.parent)
        return evicted

    def drain_changes(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Return and forget what was stored and evicted since the last call.

        A hash that was both is reported once, as what it is now.
        """
        present = self._node_by_hash
        stored = tuple(h for h in dict.fromkeys(self._stored) if h in present)
        evicted = tuple(h for h in dict.fromkeys(self._evicted) if h not in present)
        self._stored.clear()
        self._evicted.clear()
        return stored, evicted

    def check_invariants(self) -> None:
        """Assert the tree's shape, that holds cover ancestors, and that idle leaves are offered."""
        assert len(self._node_by_hash) == len(self._node_by_block)
        num_children: dict[BlockHash, int] = {}
        offered = {id(node) for last, _, node in self._leaves if self._is_current(node, last)}
        for block_hash, node in self._node_by_hash.items():
            assert node.block_hash == block_hash
            assert self._node_by_block[node.block_id] is node
            parent = node.parent
            if parent is not None:
                assert self._node_by_hash[parent.block_hash] is parent
                assert parent.is_held or not node.is_held
                num_children[parent.block_hash] = num_children.get(parent.block_hash, 0) + 1
            assert not node.is_evictable() or id(node) in offered
        for block_hash, node in self._node_by_hash.items():
            assert node.num_children == num_children.get(block_hash, 0)

    def _offer(self, node: _Node) -> None:
        if node.is_evictable():
            self._num_entries += 1
            heappush(self._leaves, (node.last_used, self._num_entries, node))

    def _is_current(self, node: _Node, last_used: int) -> bool:
        return (
            node.is_evictable()
            and node.last_used == last_used
            and self._node_by_hash.get(node.block_hash) is node
        )

    def _forget_stale_entries(self) -> None:
        self._leaves = [entry for entry in self._leaves if self._is_current(entry[2], entry[0])]
        heapify(self._leaves)
