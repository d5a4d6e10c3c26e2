"""A router's half of the cache ledger: which block hashes every worker's caches hold, followed.

A hint for routing: nothing that must be right reads it. See `writer` for the other half and
`state` for what both mean.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, assert_never

import msgspec

from control_plane.background import OnFailure
from control_plane.etcd.client import EtcdClient
from control_plane.etcd.prefix_watch import PrefixWatch
from control_plane.etcd.values import Deleted, KeyValue, Listing
from control_plane.keys import ClusterKeys
from control_plane.ledger.records import CacheCounters, decode
from control_plane.ledger.state import Change, Effect, Entry, Gap, Gone, ReaderState, Snapshot
from core.back_off import BackOff
from core.block_hash import BlockHash
from core.ids import Boot, WorkerId

_log = logging.getLogger(__name__)


class LedgerListener(Protocol):
    """Whoever keeps an index. Callbacks run on the event loop and must not block."""

    def on_snapshot(self, worker_id: WorkerId, boot: Boot, hashes: list[BlockHash]) -> None:
        """Take all that a worker's caches hold, in place of everything told before."""
        ...

    def on_delta(
        self,
        worker_id: WorkerId,
        boot: Boot,
        stored: list[BlockHash],
        evicted: list[BlockHash],
    ) -> None:
        """Take a change; no hash is in both lists."""
        ...

    def on_gone(self, worker_id: WorkerId) -> None:
        """Forget what a worker's caches held. It may live (its lease was lost); then a snapshot
        follows."""
        ...


class LedgerReader:
    """Tells a listener of all workers' caches until closed. Make it on the event loop.

    Args:
        on_failure: told when the listener fails; nothing is followed any more.
    """

    def __init__(
        self,
        client: EtcdClient,
        cluster: str,
        listener: LedgerListener,
        *,
        on_failure: OnFailure | None = None,
    ) -> None:
        keys = ClusterKeys(cluster)
        self._prefix = keys.ledger
        self._listener = listener
        self._rng = client.rng
        self._state = ReaderState()
        self._back_off = BackOff(first_s=0.2, limit_s=10.0)
        self._relisting: asyncio.TimerHandle | None = None
        self._watch = PrefixWatch(
            client, keys.ledger, self, world_key=keys.world, on_failure=on_failure
        )

    @property
    def counters(self) -> dict[WorkerId, CacheCounters]:
        """Prefix-cache hits and preemptions that each worker told last."""
        return self._state.counters

    async def close(self) -> None:
        """Stop; no callback follows."""
        if self._relisting is not None:
            self._relisting.cancel()
        await self._watch.close()

    def on_listing(self, listing: Listing, *, replay_from: int) -> int:
        """Take the ledgers as they are: `PrefixListener`."""
        entries = [entry for item in listing.items if (entry := self._entry(item)) is not None]
        effects, start = self._state.take_listing(
            entries, listing.revision, replay_from=replay_from
        )
        self._tell(effects)
        if not self._state.stale:
            self._back_off.reset()
        return start

    def on_changes(self, changes: list[KeyValue | Deleted]) -> None:
        """Take what changed: `PrefixListener`."""
        for change in changes:
            entry = self._entry(change)
            if entry is not None:
                self._tell(self._state.take_change(entry))

    def _entry(self, change: KeyValue | Deleted) -> Entry | None:
        worker_id, _, name = change.key.removeprefix(self._prefix).partition("/")
        try:
            record = decode(name, change.value if isinstance(change, KeyValue) else None)
        except (ValueError, msgspec.MsgspecError) as error:
            _log.warning("%s is not of this ledger: %s", change.key, error)
            return None
        if record is None:
            return None
        return Entry(WorkerId(worker_id), record, change.mod_revision)

    def _tell(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Snapshot():
                    self._listener.on_snapshot(*effect)
                case Change():
                    self._listener.on_delta(*effect)
                case Gone():
                    self._listener.on_gone(*effect)
                case Gap():
                    self._list_again_soon(effect.worker_id)
                case _:
                    assert_never(effect)

    def _list_again_soon(self, worker_id: WorkerId) -> None:
        """Wait a little first: all readers miss the same deltas at the same moment."""
        _log.info("cache ledger: lost track of %s, listing again", worker_id)
        if self._relisting is None:
            loop = asyncio.get_running_loop()
            self._relisting = loop.call_later(self._back_off.next_s(self._rng), self._list_again)

    def _list_again(self) -> None:
        self._relisting = None
        self._watch.list_again()
