"""A worker's entry in etcd, kept there for as long as the worker lives.

    grant a lease -> put the record under it (compare-and-set with what was there) -> registered
          ^                                                                              |
          +-- the lease is lost, the key was deleted, or etcd came back empty -----------+

Losing the entry changes its `registration` number only: nothing here touches serving.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from control_plane import background
from control_plane.background import OnFailure
from control_plane.etcd.client import EtcdClient
from control_plane.etcd.lease import Lease
from control_plane.etcd.prefix_watch import PrefixWatch
from control_plane.etcd.values import Deleted, KeyValue, Listing, Put
from control_plane.keys import ClusterKeys
from core.back_off import BackOff
from core.clock import Clock
from core.errors import ControlPlaneError
from core.ids import WorkerId
from core.worker_record import WorkerRecord

_log = logging.getLogger(__name__)


class RegisteredEntry(NamedTuple):
    """A worker's entry as it is in etcd.

    A transaction that expects `value` at `key` is fenced: it fails once the entry is gone or is
    another process's. What is put under `lease` vanishes with the entry.
    """

    key: str
    value: bytes
    lease: int


class RegistrationHandle:
    """Made by `Registry.register`; `close` gives the entry back.

    Args:
        on_failure: told when anything but an outage ends the keeping of the entry, such as a
            callback that fails: the worker would be missing for ever.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: ClusterKeys,
        record: WorkerRecord,
        *,
        lease_s: float,
        clock: Clock,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._key = keys.worker(record.worker_id)
        self._record = record
        self._lease_s = lease_s
        self._clock = clock
        self._lease: Lease | None = None
        self._registered = asyncio.Event()
        self._must_register = asyncio.Event()
        self._must_register.set()
        self._is_superseded = False
        self._revision = 0
        self._entry: RegisteredEntry | None = None
        self._on_registered: list[Callable[[], None]] = []
        self._watch: PrefixWatch | None = None
        self._on_failure = on_failure
        self._keeping = background.start(
            self._keep(), name=f"register {record.worker_id}", on_failure=on_failure
        )

    @property
    def record(self) -> WorkerRecord:
        """What is, or will be, registered; its `registration` is that of the last attempt."""
        return self._record

    @property
    def entry(self) -> RegisteredEntry | None:
        """What is in etcd, for writes in the worker's name; None while it is not there."""
        return self._entry if self._registered.is_set() else None

    @property
    def worker_id(self) -> WorkerId:
        """Whose entry this is."""
        return self._record.worker_id

    def on_registered(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after each registration: all that hung on a lost lease is gone."""
        self._on_registered.append(callback)

    def is_valid(self, now: float) -> bool:
        """Whether the entry is certain to be there: the local fence of role decisions and of
        writes in the worker's name."""
        return self._registered.is_set() and self._lease is not None and self._lease.is_valid(now)

    async def wait_registered(self) -> None:
        """Return once the entry is there, with all changes."""
        await self._registered.wait()

    def update(self, **changes: object) -> None:
        """Change fields of the record, such as its role, and register it so."""
        self._record = msgspec.structs.replace(self._record, **changes)
        self._register_again()

    async def close(self) -> None:
        """Delete the entry and all that is under its lease. Without etcd it goes after the TTL."""
        await background.stop(self._keeping)
        if self._watch is not None:
            await self._watch.close()
        self._registered.clear()
        if self._lease is not None:
            await self._lease.revoke()

    def on_listing(self, listing: Listing, *, replay_from: int) -> int:
        """See whether our entry is there: `PrefixListener`."""
        del replay_from
        self._see(next((item for item in listing.items if item.key == self._key), None))
        return listing.revision + 1

    def on_changes(self, changes: list[KeyValue | Deleted]) -> None:
        """See our entry change: `PrefixListener`."""
        for change in changes:
            if change.key == self._key and change.mod_revision > self._revision:
                self._see(change if isinstance(change, KeyValue) else None)

    def _see(self, entry: KeyValue | None) -> None:
        if entry is None:
            if self._registered.is_set() or self._is_superseded:
                _log.warning("the entry of %s is gone from etcd", self._record.worker_id)
                self._register_again()
        elif self._registered.is_set() and _boot_of(entry) != self._record.boot:
            # The newest life of a worker wins: two would overwrite each other for ever
            _log.error(
                "another process registered as %s, and gets its requests; give each worker of a "
                "cluster an --id of its own",
                self._record.worker_id,
            )
            self._registered.clear()
            self._is_superseded = True

    def _register_again(self) -> None:
        self._registered.clear()
        self._must_register.set()

    async def _keep(self) -> None:
        back_off = BackOff(first_s=0.1, limit_s=2.0)
        while True:
            await self._must_register.wait()
            try:
                self._must_register.clear()
                await self._register()
                back_off.reset()
            except ControlPlaneError as error:
                self._must_register.set()
                _log.debug("registration of %s: %s", self._record.worker_id, error)
                await asyncio.sleep(back_off.next_s(self._client.rng))

    async def _register(self) -> None:
        await ensure_world(self._client, self._keys)
        lease = await self._living_lease()
        predecessor = await self._client.get(self._key)
        last = _registration_of(predecessor)
        # Counted before it is known to be there: a write without an answer may have happened
        record = self._record = msgspec.structs.replace(
            self._record, registration=max(last, self._record.registration) + 1
        )
        value = msgspec.json.encode(record)
        revision = await self._client.transaction(
            {self._key: predecessor.value if predecessor else None},
            [Put(self._key, value, lease.id)],
        )
        if revision is None:
            msg = f"the entry of {record.worker_id} changed meanwhile"
            raise ControlPlaneError(msg)
        self._revision = revision
        self._entry = RegisteredEntry(self._key, value, lease.id)
        self._is_superseded = False
        if self._must_register.is_set():
            return  # changed or lost meanwhile: who waits, waits for what it is now
        self._registered.set()
        _log.info("registered %s, registration %d", record.worker_id, record.registration)
        for callback in self._on_registered:
            callback()
        if self._watch is None:
            self._watch = PrefixWatch(
                self._client,
                self._key,
                self,
                world_key=self._keys.world,
                on_failure=self._on_failure,
            )

    async def _living_lease(self) -> Lease:
        if self._lease is not None and not self._lease.is_lost:
            if await self._client.keep_alive(self._lease.id) > 0:
                return self._lease
            self._lease.abandon()
        self._lease = await Lease.grant(
            self._client, self._lease_s, clock=self._clock, on_failure=self._on_failure
        )
        self._lease.on_lost(self._register_again)
        return self._lease


async def ensure_world(client: EtcdClient, keys: ClusterKeys) -> None:
    """Give an etcd without data a new `world`.

    Raises:
        ControlPlaneError: no answer within the deadline.
    """
    await client.transaction({keys.world: None}, [Put(keys.world, uuid.uuid4().bytes)])


def _boot_of(entry: KeyValue) -> str | None:
    record = decode_record(entry)
    return record.boot if record else None


def _registration_of(entry: KeyValue | None) -> int:
    record = decode_record(entry) if entry else None
    return record.registration if record else 0


def decode_record(entry: KeyValue) -> WorkerRecord | None:
    """Return an entry's record, None (and a log line) when it is not one."""
    try:
        return msgspec.json.decode(entry.value, type=WorkerRecord)
    except msgspec.DecodeError as error:
        _log.warning("%s is not a worker's record: %s", entry.key, error)
        return None
