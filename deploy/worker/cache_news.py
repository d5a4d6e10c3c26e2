"""What the pools say of a worker's caches, on its way to the cache ledger.

Block hashes go at once: the ledger gathers them. Totals are the engine's, so asking for them takes
the step loop's time: they are fetched once a heartbeat, and only while something changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from core.block_hash import BlockHash
from core.ids import RequestId
from engine.engine_thread import EngineStopped
from engine.events import CacheChanged, EngineStats


class Ledger(Protocol):
    """`control_plane.ledger.writer.LedgerWriter`."""

    def publish(
        self,
        stored: Iterable[BlockHash] = (),
        evicted: Iterable[BlockHash] = (),
        *,
        hits: Mapping[str, int] | None = None,
        preemptions: int | None = None,
    ) -> None:
        """Take a step's news; never blocks."""
        ...

    def preempted(self, request_id: RequestId, tier: str) -> None:
        """Record that a request lost its blocks here."""
        ...


class CacheNews:
    """Feeds one worker's ledger. Used on the event loop alone.

    Args:
        stats: asks the engine.
        pace_s: the shortest time between two such questions.
    """

    def __init__(
        self, ledger: Ledger, stats: Callable[[], Awaitable[EngineStats]], *, pace_s: float
    ) -> None:
        self._ledger = ledger
        self._stats = stats
        self._pace_s = pace_s
        self._changed = asyncio.Event()

    def cache_changed(self, event: CacheChanged) -> None:
        """Blocks became matchable, or were evicted."""
        self._ledger.publish(event.stored, event.evicted)
        self._changed.set()

    def preempted(self, request_id: RequestId) -> None:
        """A request lost its blocks, and recomputes."""
        self._ledger.preempted(request_id, "recompute")
        self._changed.set()

    async def tell_totals(self) -> None:
        """Keep the ledger's totals up to date, until cancelled or the engine stops."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                stats = await self._stats()
            except EngineStopped:
                return  # why it did is told to the pool
            hits = {
                "local_compute": stats.prompt_tokens_computed + stats.peer_tokens_computed,
                "local_cache": stats.prompt_tokens_cached + stats.peer_tokens_cached,
                "transferred": stats.prompt_tokens_received,
            }
            self._ledger.publish(hits=hits, preemptions=stats.preemptions)
            await asyncio.sleep(self._pace_s)
