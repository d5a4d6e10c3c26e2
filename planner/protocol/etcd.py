"""A simulated etcd, as far as routers see it: who is registered, and what caches hold.

News come late, in order per router. While it is away none do; then every router lists again, and an
etcd that was frozen may have dropped every key meanwhile, although the workers live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from control_plane.registry import WorkerChange, WorkerSeen, WorkerSuspect
from core.block_hash import BlockHash
from core.ids import Boot, WorkerId
from core.worker_record import WorkerRecord
from engine.events import CacheChanged
from kv_transfer.inprocess.model import Dice
from planner.protocol.event_log import EventLog
from planner.protocol.process import Lane, Process
from planner.protocol.virtual_loop import VirtualLoop

_NEWS_MAX_S = 0.05
_LOST_NEWS = 0.05
"""Share of the ledger's news that are lost: it is a hint, no correctness decision reads it."""


class View(Protocol):
    """What a router makes of it; `router.dispatch.dispatcher.RouterDispatcher`."""

    def on_worker_change(self, change: WorkerChange) -> None:
        """A worker registered, or its key vanished."""
        ...

    def on_snapshot(self, worker_id: WorkerId, boot: Boot, hashes: tuple[BlockHash, ...]) -> None:
        """All that a worker's cache holds."""
        ...

    def on_delta(
        self,
        worker_id: WorkerId,
        boot: Boot,
        stored: tuple[BlockHash, ...],
        evicted: tuple[BlockHash, ...],
    ) -> None:
        """What changed."""
        ...


class _Key(msgspec.Struct, eq=False):
    """One worker's entry, and its cache as the ledger knows it."""

    process: Process
    record: WorkerRecord
    is_present: bool = False
    hashes: set[BlockHash] = msgspec.field(default_factory=set[BlockHash])


class Watcher:
    """One router's watch: delivers in order, one piece of news after another."""

    def __init__(self, process: Process, view: View, etcd: Etcd) -> None:
        self.process = process
        self._view = view
        self._etcd = etcd
        self._news: deque[Callable[[View], None]] = deque()
        self._last_at = 0.0

    def tell(self, news: Callable[[View], None]) -> None:
        """Deliver later."""
        self._last_at = max(self._last_at, self._etcd.draw_arrival())
        self._news.append(news)
        self._etcd.loop.call_in(self.process, Lane.MESSAGE, self._last_at, self._deliver)

    def _deliver(self) -> None:
        self._news.popleft()(self._view)


class Etcd:
    """Keys under leases.

    Args:
        lease_s: from the last keepalive of a worker until its key goes.
    """

    def __init__(self, loop: VirtualLoop, dice: Dice, log: EventLog, *, lease_s: float) -> None:
        self.loop = loop
        self._dice = dice
        self._log = log
        self._lease_s = lease_s
        self._keys: dict[WorkerId, _Key] = {}
        self._watchers: list[Watcher] = []
        self.is_away = False

    def draw_arrival(self) -> float:
        """Return when news of now arrive."""
        return self.loop.time() + self._dice.uniform(0.0005, _NEWS_MAX_S)

    # --- routers and workers ----------------------------------------------------------------------

    def watch(self, process: Process, view: View) -> None:
        """Tell a router all there is, and what changes."""
        watcher = Watcher(process, view, self)
        self._watchers.append(watcher)
        if not self.is_away:
            self._list(watcher)

    def register(self, process: Process, record: WorkerRecord) -> None:
        """A worker's process wants to be found, in place of its life before."""
        key = self._keys[record.worker_id] = _Key(process, record)
        self._put_later(key)

    def cache_changed(self, record: WorkerRecord, event: CacheChanged) -> None:
        """A worker's ledger writer has news."""
        key = self._keys.get(record.worker_id)
        if key is None or key.record.boot != record.boot:
            return
        key.hashes.update(event.stored)
        key.hashes.difference_update(event.evicted)
        if self.is_away or self._dice.random() < _LOST_NEWS:
            return
        worker_id, boot, stored, evicted = (
            record.worker_id,
            record.boot,
            event.stored,
            event.evicted,
        )
        self._tell(lambda view: view.on_delta(worker_id, boot, stored, evicted))

    def stopped(self, process: Process) -> None:
        """A worker died or froze: its lease runs out."""
        key = next((key for key in self._keys.values() if key.process is process), None)
        if key is not None:
            at = self.loop.time() + self._lease_s * self._dice.uniform(0.7, 1.0)
            self.loop.call_world(at, self._expire, key, process.stopped_at)

    def thawed(self, process: Process) -> None:
        """A worker goes on, and finds out whether its lease still lives."""
        for key in self._keys.values():
            if key.process is process and not key.is_present:
                self._put_later(key)

    # --- faults -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """It does not answer any more."""
        self.is_away = True
        self._log.add("etcd", "away")

    def come_back(self, *, forgot: bool) -> None:
        """It answers again.

        Args:
            forgot: every lease ran out while it stood still.
        """
        self.is_away = False
        self._log.add("etcd", "back without keys" if forgot else "back")
        for key in self._keys.values():
            if key.is_present and (forgot or not key.process.is_alive):
                self._remove(key)
            if key.process.is_running and not key.is_present:
                self._put_later(key)
        for watcher in self._watchers:
            self._list(watcher)

    # --- keys -------------------------------------------------------------------------------------

    def _put_later(self, key: _Key) -> None:
        self.loop.call_world(self.draw_arrival(), self._put, key)

    def _put(self, key: _Key) -> None:
        worker_id = key.record.worker_id
        is_current = self._keys[worker_id] is key
        if not is_current or key.is_present or self.is_away or not key.process.is_alive:
            return
        key.is_present = True
        registration = key.record.registration + 1
        key.record = msgspec.structs.replace(key.record, registration=registration)
        record = key.record
        self._log.add("etcd", "has", record.boot)
        self._tell(lambda view: view.on_worker_change(WorkerSeen(record)))
        self._tell_snapshot(key, self._watchers)

    def _expire(self, key: _Key, stopped_at: float) -> None:
        process = key.process
        is_stopped_since = not process.is_running and process.stopped_at == stopped_at
        if is_stopped_since and key.is_present and not self.is_away:
            self._remove(key)

    def _remove(self, key: _Key) -> None:
        key.is_present = False
        record = key.record
        if self._keys[record.worker_id] is key:
            self._log.add("etcd", "lost", record.boot)
            suspect = WorkerSuspect(record.worker_id, record.boot)
            self._tell(lambda view: view.on_worker_change(suspect))

    def _list(self, watcher: Watcher) -> None:
        for key in self._keys.values():
            if key.is_present:
                seen = WorkerSeen(key.record)
                watcher.tell(_change(seen))
                self._tell_snapshot(key, [watcher])

    def _tell_snapshot(self, key: _Key, watchers: list[Watcher]) -> None:
        worker_id, boot, hashes = key.record.worker_id, key.record.boot, tuple(sorted(key.hashes))
        for watcher in watchers:
            watcher.tell(lambda view: view.on_snapshot(worker_id, boot, hashes))

    def _tell(self, news: Callable[[View], None]) -> None:
        for watcher in self._watchers:
            if watcher.process.is_alive:
                watcher.tell(news)


def _change(change: WorkerChange) -> Callable[[View], None]:
    return lambda view: view.on_worker_change(change)
