"""cache_news: hashes at once, totals at the heartbeat's pace, and only after changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import pytest

from core.block_hash import BlockHash
from core.ids import RequestId
from deploy.worker.cache_news import CacheNews
from engine.engine_thread import EngineStopped
from engine.events import CacheChanged, EngineStats

pytestmark = pytest.mark.anyio

HASH = BlockHash(b"h" * 16)


class FakeLedger:
    def __init__(self) -> None:
        self.told: list[object] = []
        self.totals: asyncio.Queue[tuple[dict[str, int], int | None]] = asyncio.Queue()

    def publish(
        self,
        stored: Iterable[BlockHash] = (),
        evicted: Iterable[BlockHash] = (),
        *,
        hits: Mapping[str, int] | None = None,
        preemptions: int | None = None,
    ) -> None:
        if hits is not None:
            self.totals.put_nowait((dict(hits), preemptions))
        else:
            self.told.append((tuple(stored), tuple(evicted)))

    def preempted(self, request_id: RequestId, tier: str) -> None:
        self.told.append((request_id, tier))


class FakeEngine:
    def __init__(self) -> None:
        self.num_asked = 0
        self.has_stopped = False

    async def stats(self) -> EngineStats:
        self.num_asked += 1
        if self.has_stopped:
            raise EngineStopped
        zeros = {name: 0 for name in EngineStats.__struct_fields__ if not name.startswith("iter")}
        return EngineStats(
            **{**zeros, "prompt_tokens_computed": self.num_asked, "preemptions": 2}  # pyright: ignore[reportArgumentType] - zeros fit all
        )


async def test_a_burst_of_changes_asks_the_engine_once() -> None:
    ledger, engine = FakeLedger(), FakeEngine()
    news = CacheNews(ledger, engine.stats, pace_s=3600.0)
    task = asyncio.create_task(news.tell_totals())
    for _ in range(100):
        news.cache_changed(CacheChanged((HASH,), ()))
    news.preempted(RequestId("r"))
    assert ledger.told == [((HASH,), ())] * 100 + [("r", "recompute")]
    hits, preemptions = await ledger.totals.get()
    assert hits == {"local_compute": 1, "local_cache": 0, "transferred": 0}
    assert preemptions == 2
    news.cache_changed(CacheChanged((), (HASH,)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.num_asked == 1, "not before the next heartbeat"
    task.cancel()
    await asyncio.wait({task})


async def test_it_tells_again_only_after_a_change() -> None:
    ledger, engine = FakeLedger(), FakeEngine()
    news = CacheNews(ledger, engine.stats, pace_s=0.0)
    task = asyncio.create_task(news.tell_totals())
    news.cache_changed(CacheChanged((HASH,), ()))
    await ledger.totals.get()
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.num_asked == 1
    news.cache_changed(CacheChanged((), (HASH,)))
    hits, _ = await ledger.totals.get()
    assert hits["local_compute"] == 2
    engine.has_stopped = True
    news.cache_changed(CacheChanged((HASH,), ()))
    await task  # no failure of its own: the pool is told why
