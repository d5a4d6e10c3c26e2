"""A worker's half of the cache ledger: what its caches hold and what was preempted, told to etcd.

Steps call `publish`, which only notes; one task writes what has gathered, at most `ledger_hz` times
a second. Every write is fenced twice, locally by the time since the lease's last keepalive was sent
and in etcd by the worker's entry, and hangs on its lease, so that a process that lost its place
writes nothing, and a dead worker's ledger vanishes. Without etcd the truth is kept
here and told, as a snapshot, when etcd is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping

import msgspec

from control_plane import background
from control_plane.background import OnFailure
from control_plane.etcd.client import EtcdClient
from control_plane.etcd.values import Put
from control_plane.keys import ClusterKeys
from control_plane.ledger.records import CacheCounters, Head, snapshot_parts
from control_plane.ledger.state import WriteDelta, WriterState, WriteSnapshot
from control_plane.preemptions import Preemption
from control_plane.registration import RegisteredEntry, RegistrationHandle
from core.back_off import BackOff
from core.block_hash import BlockHash
from core.clock import Clock
from core.errors import ControlPlaneError
from core.ids import RequestId

MAX_HZ = 10.0
"""Writes a second of one worker."""

CLUSTER_HZ = 1000.0
"""Writes a second of all workers together."""

_PREEMPTIONS_A_WRITE = 100
"""etcd refuses transactions of more than 128 operations."""

_log = logging.getLogger(__name__)


class LedgerWriter:
    """Made beside the worker's registration; `close` it before that.

    Args:
        ledger_hz: writes a second, at most `MAX_HZ`.
        on_failure: told when anything but an outage ends the writing.
    """

    def __init__(
        self,
        client: EtcdClient,
        cluster: str,
        registration: RegistrationHandle,
        *,
        clock: Clock,
        ledger_hz: float = MAX_HZ,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._client = client
        self._keys = ClusterKeys(cluster)
        self._registration = registration
        self._worker_id = registration.worker_id
        self._boot = registration.record.boot
        self._clock = clock
        self._hz = min(ledger_hz, MAX_HZ)
        self._num_workers = 1
        self._state = WriterState(self._boot, now=clock.now())
        self._head: bytes | None = None
        self._preempted: dict[RequestId, str] = {}
        self._untold: set[RequestId] = set()
        self._news = asyncio.Event()
        registration.on_registered(self._begin_anew)
        self._writing = background.start(
            self._write_for_ever(), name="cache ledger", on_failure=on_failure
        )

    def publish(
        self,
        stored: Iterable[BlockHash] = (),
        evicted: Iterable[BlockHash] = (),
        *,
        hits: Mapping[str, int] | None = None,
        preemptions: int | None = None,
    ) -> None:
        """Take a step's news; never blocks.

        Args:
            stored: hashes of blocks that became matchable here.
            evicted: hashes of blocks that no longer are.
            hits: prompt tokens by source, totals since boot; None: as before.
            preemptions: total since boot; None: as before.
        """
        self._state.change(stored, evicted)
        last = self._state.counters
        self._state.count(
            CacheCounters(
                hits=last.hits if hits is None else dict(hits),
                preemptions=last.preemptions if preemptions is None else preemptions,
            )
        )
        if self._state.has_news:
            self._news.set()

    def preempted(self, request_id: RequestId, tier: str) -> None:
        """Record that a request lost its blocks here."""
        self._preempted[request_id] = tier
        self._untold.add(request_id)
        self._news.set()

    def resumed(self, request_id: RequestId) -> None:
        """Record that it has blocks again, or ended; unknown requests are ignored."""
        if self._preempted.pop(request_id, None) is not None:
            self._untold.add(request_id)
            self._news.set()

    async def close(self) -> None:
        """Stop writing; the ledger vanishes with the registration."""
        await background.stop(self._writing)

    def _begin_anew(self) -> None:
        self._state.lost()
        self._untold |= set(self._preempted)
        self._news.set()

    async def _write_for_ever(self) -> None:
        back_off = BackOff(first_s=0.2, limit_s=5.0)
        while True:
            await self._wait_for_news()
            await self._registration.wait_registered()
            self._news.clear()
            try:
                is_fenced = not await self._write_news()
                back_off.reset()
            except ControlPlaneError as error:
                _log.debug("cache ledger: %s", error)
                is_fenced = True
            if is_fenced:
                self._begin_anew()
                await asyncio.sleep(back_off.next_s(self._client.rng))
            else:
                await asyncio.sleep(max(1 / self._hz, self._num_workers / CLUSTER_HZ))

    async def _wait_for_news(self) -> None:
        """Return with the first news, or when a snapshot is due."""
        if self._state.has_news:
            return  # it came before a routine snapshot, which leaves it to the next delta
        due_at = self._state.snapshot_due_at()
        wait_s = None if due_at is None else max(0.0, due_at - self._clock.now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._news.wait()

    async def _write_news(self) -> bool:
        """Write all that is untold; return False when the entry is ours no more.

        Raises:
            ControlPlaneError: etcd did not answer; what was written is not known.
        """
        entry = self._registration.entry
        if entry is None or not self._registration.is_valid(self._clock.now()):
            return False
        write = self._state.next_write(self._clock.now())
        if isinstance(write, WriteDelta):
            value = msgspec.msgpack.encode(write.delta)
            put = Put(self._keys.delta(self._worker_id), value, entry.lease)
            expect = {entry.key: entry.value, self._keys.head(self._worker_id): self._head}
            if await self._client.transaction(expect, [put]) is None:
                return False
        elif isinstance(write, WriteSnapshot) and not await self._write_snapshot(entry, write):
            return False
        return await self._write_preemptions(entry)

    async def _write_snapshot(self, entry: RegisteredEntry, write: WriteSnapshot) -> bool:
        num_parts = 0
        for number, part in enumerate(snapshot_parts(write.hashes)):
            num_parts = number + 1
            put = Put(self._keys.part(self._worker_id, write.generation, number), part, entry.lease)
            if await self._client.transaction({entry.key: entry.value}, [put]) is None:
                return False
        head = Head(self._boot, write.generation, write.seq, num_parts, write.counters)
        self._head = msgspec.msgpack.encode(head)
        written = await self._client.transaction(
            {entry.key: entry.value},
            [Put(self._keys.head(self._worker_id), self._head, entry.lease)],
            delete_ranges=self._keys.other_snapshots(self._worker_id, write.generation),
        )
        if written is None:
            return False
        self._num_workers = (await self._client.newest(self._keys.workers)).num_keys
        return True

    async def _write_preemptions(self, entry: RegisteredEntry) -> bool:
        while self._untold:
            some = set(sorted(self._untold)[:_PREEMPTIONS_A_WRITE])
            self._untold -= some  # now, since they may change again while etcd is asked
            written = None
            try:
                written = await self._client.transaction(
                    {entry.key: entry.value},
                    [self._preemption(r, entry) for r in some if r in self._preempted],
                    deletes=[self._keys.preemption(r) for r in some if r not in self._preempted],
                )
            finally:
                if written is None:
                    self._untold |= some
            if written is None:
                return False
        return True

    def _preemption(self, request_id: RequestId, entry: RegisteredEntry) -> Put:
        value = Preemption(self._worker_id, self._boot, self._preempted[request_id])
        return Put(self._keys.preemption(request_id), msgspec.json.encode(value), entry.lease)
