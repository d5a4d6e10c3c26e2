"""A simulated etcd, as far as routers see it: who is registered, and what caches hold.

News come late, in order per router. While it is away none do; then every router lists again, and an
etcd that was frozen may have dropped every key meanwhile, although the workers live.
"""

from __future__ import annotations

import asyncio
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


class Entry:
    """One worker's key, and its cache as the ledger knows it: `control_plane.roles.duty.Entry`.

    Attributes:
        record: as the worker wants it.
        stored: as etcd has it, None where it has not.
    """

    def __init__(self, etcd: Etcd, process: Process, record: WorkerRecord) -> None:
        self._etcd = etcd
        self._written = asyncio.Event()
        self.process = process
        self.record = record
        self.stored: WorkerRecord | None = None
        self.hashes: set[BlockHash] = set()

    @property
    def is_written(self) -> bool:
        """Whether etcd has it as it is now."""
        return self._written.is_set()

    def put(self) -> None:
        """Etcd has taken it, once more."""
        registration = self.record.registration + 1
        self.stored = self.record = msgspec.structs.replace(self.record, registration=registration)
        self._written.set()

    def vanish(self) -> None:
        """It is gone."""
        self.stored = None
        self._written.clear()

    def update(self, **changes: object) -> None:
        """Change fields of the record."""
        self.record = msgspec.structs.replace(self.record, **changes)
        self._written.clear()
        self._etcd.put_later(self)

    async def wait_registered(self) -> None:
        """Return once it is there as it is now."""
        await self._written.wait()


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
        self._entries: dict[WorkerId, Entry] = {}
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

    def register(self, process: Process, record: WorkerRecord) -> Entry:
        """A worker's process wants to be found, in place of its life before."""
        entry = self._entries[record.worker_id] = Entry(self, process, record)
        self.put_later(entry)
        return entry

    def cache_changed(self, record: WorkerRecord, event: CacheChanged) -> None:
        """A worker's ledger writer has news."""
        entry = self._entries.get(record.worker_id)
        if entry is None or entry.record.boot != record.boot:
            return
        entry.hashes.update(event.stored)
        entry.hashes.difference_update(event.evicted)
        if self.is_away or self._dice.random() < _LOST_NEWS:
            return
        worker_id, boot, stored, evicted = (
            record.worker_id,
            record.boot,
            event.stored,
            event.evicted,
        )
        self._tell(lambda view: view.on_delta(worker_id, boot, stored, evicted))

    def put_later(self, entry: Entry) -> None:
        """A worker writes its entry, as soon as etcd takes it."""
        self.loop.call_world(self.draw_arrival(), self._put, entry)

    def stopped(self, process: Process) -> None:
        """A worker died or froze: its lease runs out."""
        entry = next((e for e in self._entries.values() if e.process is process), None)
        if entry is not None:
            at = self.loop.time() + self._lease_s * self._dice.uniform(0.7, 1.0)
            self.loop.call_world(at, self._expire, entry, process.stopped_at)

    def thawed(self, process: Process) -> None:
        """A worker goes on, and finds out whether its lease still lives."""
        for entry in self._entries.values():
            if entry.process is process and not entry.is_written:
                self.put_later(entry)

    def left(self, process: Process) -> None:
        """A worker takes its entry back, or leaves it to its lease."""
        for entry in self._entries.values():
            if entry.process is process and entry.stored and not self.is_away:
                self._remove(entry)

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
        for entry in self._entries.values():
            if entry.stored and (forgot or not entry.process.is_alive):
                self._remove(entry)
            if entry.process.is_running and not entry.is_written:
                self.put_later(entry)
        for watcher in self._watchers:
            self._list(watcher)

    def revoke(self, name: str) -> None:
        """Somebody ends a worker's lease, which sees that and registers again."""
        entry = self._entries.get(WorkerId(name))
        if entry is None or not entry.stored or self.is_away:
            return
        self._remove(entry)
        if entry.process.is_running:
            self.put_later(entry)

    # --- keys -------------------------------------------------------------------------------------

    def _put(self, entry: Entry) -> None:
        is_current = self._entries[entry.record.worker_id] is entry
        if not is_current or entry.is_written or self.is_away or not entry.process.is_alive:
            return
        entry.put()
        record = entry.record
        self._log.add("etcd", "has", record)
        self._tell(lambda view: view.on_worker_change(WorkerSeen(record)))
        self._tell_snapshot(entry, self._watchers)

    def _expire(self, entry: Entry, stopped_at: float) -> None:
        process = entry.process
        is_stopped_since = not process.is_running and process.stopped_at == stopped_at
        if is_stopped_since and entry.stored and not self.is_away:
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        entry.vanish()
        record = entry.record
        if self._entries[record.worker_id] is entry:
            self._log.add("etcd", "lost", record.boot)
            suspect = WorkerSuspect(record.worker_id, record.boot)
            self._tell(lambda view: view.on_worker_change(suspect))

    def _list(self, watcher: Watcher) -> None:
        for entry in self._entries.values():
            if entry.stored:
                watcher.tell(_change(WorkerSeen(entry.stored)))
                self._tell_snapshot(entry, [watcher])

    def _tell_snapshot(self, entry: Entry, watchers: list[Watcher]) -> None:
        record, hashes = entry.record, tuple(sorted(entry.hashes))
        for watcher in watchers:
            watcher.tell(lambda view: view.on_snapshot(record.worker_id, record.boot, hashes))

    def _tell(self, news: Callable[[View], None]) -> None:
        for watcher in self._watchers:
            if watcher.process.is_alive:
                watcher.tell(news)


def _change(change: WorkerChange) -> Callable[[View], None]:
    return lambda view: view.on_worker_change(change)
