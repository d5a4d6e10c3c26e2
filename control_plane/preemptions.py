"""Which requests have lost their blocks and have none yet, as etcd has it.

Routers hear of preemptions on their workers' streams, as they happen. What is recorded here is for
those that were not there then: a router that starts while a worker is short of memory would take
what that worker tells first for its normal state, and send there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import msgspec

from control_plane.background import OnFailure
from control_plane.etcd.client import EtcdClient
from control_plane.etcd.prefix_watch import PrefixWatch
from control_plane.etcd.values import Deleted, KeyValue, Listing
from control_plane.keys import ClusterKeys
from core.ids import Boot, WorkerId

_log = logging.getLogger(__name__)


class Preemption(msgspec.Struct, frozen=True):
    """The value of `preempted/<request>`, under its worker's lease.

    Attributes:
        tier: where it goes on: "recompute", "swap" or "migrate".
    """

    worker_id: WorkerId
    boot: Boot
    tier: str


OnPreempted = Callable[[WorkerId, Boot, int], None]
"""Called with a worker's life and how many of its requests have no blocks now, when that changes.
Runs on the event loop and must not block."""


def watch_preemptions(
    client: EtcdClient,
    cluster: str,
    on_preempted: OnPreempted,
    *,
    on_failure: OnFailure | None = None,
) -> PrefixWatch:
    """Tell of every worker with preempted requests, until the returned watch is closed.

    While etcd is away nothing is told: whoever is told lets what is old count less.
    """
    keys = ClusterKeys(cluster)
    return PrefixWatch(
        client,
        keys.preempted,
        PreemptionsListener(on_preempted),
        world_key=keys.world,
        on_failure=on_failure,
    )


class PreemptionsListener:
    """Counts records by worker, and tells what changed: a `PrefixListener`."""

    def __init__(self, on_preempted: OnPreempted) -> None:
        self._on_preempted = on_preempted
        self._life_by_key: dict[str, tuple[WorkerId, Boot]] = {}
        self._told: Counter[tuple[WorkerId, Boot]] = Counter()

    def on_listing(self, listing: Listing, *, replay_from: int) -> int:
        """Take all records in place of those before."""
        del replay_from
        self._life_by_key.clear()
        for item in listing.items:
            self._put(item)
        self._tell()
        return listing.revision + 1

    def on_changes(self, changes: list[KeyValue | Deleted]) -> None:
        """Take what came and went."""
        for change in changes:
            if isinstance(change, KeyValue):
                self._put(change)
            else:
                self._life_by_key.pop(change.key, None)
        self._tell()

    def _put(self, item: KeyValue) -> None:
        try:
            record = msgspec.json.decode(item.value, type=Preemption)
        except msgspec.DecodeError as error:
            _log.warning("%s is not a preemption's record: %s", item.key, error)
            return
        self._life_by_key[item.key] = (record.worker_id, record.boot)

    def _tell(self) -> None:
        counts = Counter(self._life_by_key.values())
        for life in sorted(counts.keys() | self._told.keys()):
            if counts[life] != self._told[life]:
                self._on_preempted(*life, counts[life])
        self._told = counts
