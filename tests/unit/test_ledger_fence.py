"""A worker that cannot be certain of its lease tells the ledger nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from control_plane.ledger.writer import LedgerWriter
from control_plane.registration import RegisteredEntry
from core.clock import SystemClock
from core.ids import Boot, RequestId, WorkerId

pytestmark = pytest.mark.anyio


class Record:
    """As much of a `WorkerRecord` as the ledger reads."""

    boot = Boot("b")


class Registration:
    """An entry that is in etcd as far as is known; `valid` is what the lease says of it."""

    worker_id = WorkerId("w")
    record = Record()
    entry = RegisteredEntry("workers/w", b"record", 7)

    def __init__(self) -> None:
        self.valid = False
        self.asked = asyncio.Event()

    def on_registered(self, callback: Any) -> None: ...

    async def wait_registered(self) -> None: ...

    def is_valid(self, now: float) -> bool:
        self.asked.set()
        return self.valid


class Newest:
    """Of the workers' keys."""

    num_keys = 1


class Etcd:
    """Takes every transaction."""

    rng = random.Random(1)

    def __init__(self) -> None:
        self.num_written = 0
        self.written = asyncio.Event()

    async def transaction(self, *_: object, **__: object) -> int:
        self.num_written += 1
        self.written.set()
        return 1

    async def newest(self, _: str) -> Newest:
        return Newest()


async def test_nothing_is_written_while_the_lease_may_be_gone_and_all_of_it_after() -> None:
    registration, etcd = Registration(), Etcd()
    client: Any = etcd
    handle: Any = registration
    writer = LedgerWriter(client, "c", handle, clock=SystemClock())
    writer.preempted(RequestId("r"), "recompute")
    for _ in range(2):  # it asks again after its back-off
        registration.asked.clear()
        await asyncio.wait_for(registration.asked.wait(), 5)
        assert etcd.num_written == 0
    registration.valid = True
    await asyncio.wait_for(etcd.written.wait(), 5)
    await writer.close()
