"""Who is in the cluster: workers register under leases, routers and people watch them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from control_plane.background import OnFailure
from control_plane.etcd.client import EtcdClient
from control_plane.etcd.prefix_watch import PrefixWatch
from control_plane.etcd.values import Deleted, KeyValue, Listing
from control_plane.keys import ClusterKeys
from control_plane.registration import RegistrationHandle, decode_record
from core.clock import Clock
from core.ids import Boot, WorkerId
from core.worker_record import WorkerRecord


class WorkerSeen(msgspec.Struct, frozen=True):
    """A worker registered, or its record changed (another boot is another process)."""

    record: WorkerRecord


class WorkerSuspect(msgspec.Struct, frozen=True):
    """A worker's entry vanished. It may serve on: etcd that was frozen deletes the entries of
    living workers. Only its streams tell whether it is dead."""

    worker_id: WorkerId
    boot: Boot


WorkerChange = WorkerSeen | WorkerSuspect


class Registry:
    """The workers of one cluster.

    Args:
        lease_s: time to live of an entry whose worker etcd does not hear.
        on_failure: told, on the event loop, when registering or watching ends by anything but an
            outage of etcd; the process must end. None: the loop's exception handler.
    """

    def __init__(
        self,
        client: EtcdClient,
        cluster: str,
        clock: Clock,
        *,
        lease_s: float = 10.0,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._client = client
        self._keys = ClusterKeys(cluster)
        self._clock = clock
        self._lease_s = lease_s
        self._on_failure = on_failure

    def register(self, record: WorkerRecord) -> RegistrationHandle:
        """Begin to register a worker and to keep it registered; returns at once, with or without
        etcd (see `RegistrationHandle.wait_registered`)."""
        return RegistrationHandle(
            self._client,
            self._keys,
            record,
            lease_s=self._lease_s,
            clock=self._clock,
            on_failure=self._on_failure,
        )

    def watch_workers(self, on_change: Callable[[WorkerChange], None]) -> PrefixWatch:
        """Tell of every worker that is or will be there, until the returned watch is closed.

        While etcd is away nothing is told: the last known view holds.
        """
        return PrefixWatch(
            self._client,
            self._keys.workers,
            WorkersListener(on_change, self._keys.workers),
            world_key=self._keys.world,
            on_failure=self._on_failure,
        )


class WorkersListener:
    """Turns keys into changes: what a listing lacks is suspect, what it repeats is no news."""

    def __init__(self, on_change: Callable[[WorkerChange], None], prefix: str) -> None:
        self._on_change = on_change
        self._prefix = prefix
        self._registered: dict[WorkerId, WorkerRecord] = {}

    def on_listing(self, listing: Listing, *, replay_from: int) -> int:
        del replay_from
        present = {item.key.removeprefix(self._prefix) for item in listing.items}
        for worker_id in [known for known in self._registered if known not in present]:
            self._suspect(worker_id)
        for item in listing.items:
            self._seen(item)
        return listing.revision + 1

    def on_changes(self, changes: list[KeyValue | Deleted]) -> None:
        for change in changes:
            if isinstance(change, KeyValue):
                self._seen(change)
            else:
                self._suspect(WorkerId(change.key.removeprefix(self._prefix)))

    def _seen(self, item: KeyValue) -> None:
        record = decode_record(item)
        if record is not None and self._registered.get(record.worker_id) != record:
            self._registered[record.worker_id] = record
            self._on_change(WorkerSeen(record))

    def _suspect(self, worker_id: WorkerId) -> None:
        record = self._registered.pop(worker_id, None)
        if record is not None:
            self._on_change(WorkerSuspect(worker_id, record.boot))
