"""control_plane.roles.duty: when a worker switches or leaves, and what becomes of what is left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable

import pytest

from control_plane.roles import duty as module
from control_plane.roles.duty import HURRY_S, Duty
from core.clock import ManualClock
from core.messages import DrainWorker, SwitchRole
from core.worker_record import Role
from deploy.process_end import ProcessEnd
from deploy.worker.health import WorkerHealth
from kv_transfer.transport import Health

pytestmark = pytest.mark.anyio


class Worker:
    """Pools and an entry in etcd that do as the test says, and a log of what was asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_running = self.num_open = 0
        self.etcd = asyncio.Event()
        self.etcd.set()
        self.clock = ManualClock()
        self.end = ProcessEnd()
        self.health = WorkerHealth(self.fabric, str)
        self.health.registered()
        self.duty = Duty(
            Role.DECODE,
            self,
            self,
            health=self.health,
            end=self.end,
            drain_s=60.0,
            clock=self.clock,
        )

    async def fabric(self) -> Health:
        return Health(ok=True, transport="ucx")

    def drain(self) -> None:
        self.log.append("drain")

    def fail_over(self) -> None:
        self.log.append("fail over")

    def serve_as(self, role: Role) -> None:
        self.log.append(f"serve as {role}")

    def update(self, **changes: object) -> None:
        self.log.append(f"record {changes}")

    async def wait_registered(self) -> None:
        await self.etcd.wait()


@pytest.fixture
async def worker(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Worker]:
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    monkeypatch.setattr(module, "_FAIL_OVER_S", 0.0)
    yield Worker()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        loop.remove_signal_handler(number)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


CLOSED = ["drain", "record {'is_draining': True}"]


async def test_a_switch_waits_for_what_runs_and_for_etcd(worker: Worker) -> None:
    running = asyncio.create_task(worker.duty.run())
    worker.num_open = 1
    worker.duty.order(SwitchRole(Role.PREFILL))
    await until(lambda: worker.log == CLOSED)
    assert await worker.health.obstacle() == "draining"
    worker.etcd.clear()
    worker.num_open = 0
    recorded = "record {'role': <Role.PREFILL: 'prefill'>, 'is_draining': False}"
    await until(lambda: recorded in worker.log)
    assert worker.duty.role is Role.DECODE, "routers do not know yet"
    worker.etcd.set()
    await until(lambda: worker.duty.role is Role.PREFILL)
    assert worker.log == [*CLOSED, recorded, "serve as prefill"]
    assert not await worker.health.obstacle()
    running.cancel()


async def test_between_decode_and_both_nothing_is_drained(worker: Worker) -> None:
    running = asyncio.create_task(worker.duty.run())
    worker.num_open = worker.num_running = 1
    worker.duty.order(SwitchRole(Role.BOTH))
    await until(lambda: worker.duty.role is Role.BOTH)
    assert "drain" not in worker.log
    assert worker.log[-1] == "serve as both"
    running.cancel()


async def test_the_role_it_has_is_no_order_and_the_last_order_counts(worker: Worker) -> None:
    running = asyncio.create_task(worker.duty.run())
    worker.duty.order(SwitchRole(Role.DECODE))
    await asyncio.sleep(0.01)
    assert worker.log == []
    worker.num_open = 1
    worker.duty.order(SwitchRole(Role.PREFILL))
    await until(lambda: worker.log == CLOSED)
    worker.duty.order(SwitchRole(Role.DECODE))
    worker.num_open = 0
    await until(lambda: "serve as decode" in worker.log)
    assert "serve as prefill" not in worker.log
    running.cancel()


async def test_an_order_to_drain_ends_the_process_and_fails_over_what_is_left(
    worker: Worker,
) -> None:
    worker.num_open = worker.num_running = 2
    worker.duty.order(DrainWorker(7.0))
    await worker.end.wait()
    leaving = asyncio.create_task(worker.duty.leave())
    await until(lambda: worker.log == CLOSED)
    worker.clock.advance(6.9)
    await asyncio.sleep(0.01)
    assert not leaving.done()
    worker.clock.advance(0.2)
    await leaving
    assert worker.log == [*CLOSED, "fail over"]


async def test_without_an_order_the_deadline_is_the_setting_s(worker: Worker) -> None:
    worker.num_open = 1  # and nothing runs: a late write could land
    leaving = asyncio.create_task(worker.duty.leave())
    await until(lambda: worker.log == CLOSED)
    worker.clock.advance(59.0)
    await asyncio.sleep(0.01)
    assert not leaving.done()
    worker.clock.advance(2.0)
    await leaving
    assert worker.log == CLOSED


async def test_who_hurries_waits_for_what_runs_only_and_not_for_long(worker: Worker) -> None:
    worker.num_open = worker.num_running = 1
    leaving = asyncio.create_task(worker.duty.leave())
    await until(lambda: worker.log == CLOSED)
    worker.end.hurry()
    await asyncio.sleep(0.01)
    worker.clock.advance(HURRY_S - 0.1)
    await asyncio.sleep(0.01)
    assert not leaving.done()
    worker.num_running = 0
    await leaving
    assert worker.log == CLOSED
    worker.num_running = 1
    leaving = asyncio.create_task(worker.duty.leave())
    await asyncio.sleep(0.01)
    worker.clock.advance(HURRY_S + 0.1)
    await leaving
    assert worker.log[-1] == "fail over"
