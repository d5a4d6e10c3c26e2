"""A router's index over the cache ledger, and what the workers' caches hold in truth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from core.block_hash import BlockHash
from core.ids import Boot, WorkerId
from router.policy.prefix_index import PrefixIndex

WITHIN_S = 60.0
"""Until when what must come has come; nothing that works takes a hundredth of it."""


def block_hash(number: int) -> BlockHash:
    """Return a hash whose every byte depends on the number, as a digest's do."""
    return BlockHash((number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(16, "big"))


class FollowedIndex:
    """The real index, as a `LedgerListener` that counts what it is told."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.num_snapshots = 0
        self._changed = asyncio.Event()

    def on_snapshot(self, worker_id: WorkerId, boot: Boot, hashes: list[BlockHash]) -> None:
        self.index.apply_snapshot(worker_id, boot, hashes)
        self.num_snapshots += 1
        self._changed.set()

    def on_delta(
        self, worker_id: WorkerId, boot: Boot, stored: list[BlockHash], evicted: list[BlockHash]
    ) -> None:
        self.index.apply_delta(worker_id, boot, stored, evicted)
        self._changed.set()

    def on_gone(self, worker_id: WorkerId) -> None:
        self.index.forget(worker_id)
        self._changed.set()

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Return once it holds; looked at again after each change."""
        async with asyncio.timeout(WITHIN_S):
            while not is_met():
                self._changed.clear()
                await self._changed.wait()

    def holders(self, universe: Iterable[BlockHash]) -> dict[WorkerId, set[BlockHash]]:
        """Return which of all hashes that ever were each worker holds, as the index has it."""
        held: dict[WorkerId, set[BlockHash]] = {}
        for one in universe:
            for worker_id in self.index.match([one]):
                held.setdefault(worker_id, set()).add(one)
        return held
