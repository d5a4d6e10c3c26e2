"""What a worker is there for now: the work of its role, another role, or nothing any more.

    serving --SwitchRole--> draining --empty--> registered with the new role --> serving
       |                       |
       +--- DrainWorker, SIGTERM --> draining --empty, or the deadline--> over

Draining is the same in both: nothing new is taken, routers move what could go on elsewhere, the
rest finishes; what is left at the deadline is failed over. Between decode and both nothing need be
drained: what one took the other may finish.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import NoReturn, Protocol, assert_never

from core.clock import Clock
from core.messages import DrainWorker, SwitchRole, WorkerOrder
from core.worker_record import Role

HURRY_S = 5.0
"""From SIGINT or SIGUSR1 until what still runs is ended. This stop is the launcher's, whose grace
is 10 s: it takes the whole cluster down, and there is nobody to hand requests to."""

_FAIL_OVER_S = 1.0
"""For routers to hear that requests failed, before the process ends or does other work."""

_POLL_S = 0.02

_log = logging.getLogger(__name__)


class DrainablePools(Protocol):
    """`control_plane.roles.pools.Pools`."""

    @property
    def num_running(self) -> int:
        """Requests and attempts under way."""
        ...

    @property
    def num_open(self) -> int:
        """The same, and all else that another worker may yet want of this one."""
        ...

    def drain(self) -> None:
        """Take nothing new."""
        ...

    def fail_over(self) -> None:
        """End the requests that are left; attempts end with their writes, or with the process."""
        ...

    def serve_as(self, role: Role) -> None:
        """Take the new work of a role."""
        ...


class Entry(Protocol):
    """The worker's, in etcd: `control_plane.registration.RegistrationHandle`."""

    def update(self, **changes: object) -> None:
        """Change fields of the record, compared and set with what is there."""
        ...

    async def wait_registered(self) -> None:
        """Return once it is there."""
        ...


class Readiness(Protocol):
    """What probes are told: `deploy.worker.health.WorkerHealth`."""

    def draining(self, *, is_draining: bool) -> None:
        """It takes nothing new from now on, or takes work again."""
        ...


class End(Protocol):
    """Of the process: `deploy.process_end.ProcessEnd`."""

    @property
    def is_hurried(self) -> bool:
        """Whether it should not wait for what takes long."""
        ...

    def stop(self) -> None:
        """End it in order: somebody awaits that, and calls `Duty.leave`."""
        ...


class Duty:
    """Lives on the loop.

    Args:
        drain_s: how long what runs may take where no order says.

    Attributes:
        role: what it takes the work of; once a switch is over, the new one.
    """

    def __init__(  # noqa: PLR0913 - wiring, called once
        self,
        role: Role,
        pools: DrainablePools,
        entry: Entry,
        *,
        health: Readiness,
        end: End,
        drain_s: float,
        clock: Clock,
    ) -> None:
        self.role = role
        self._pools = pools
        self._entry = entry
        self._health = health
        self._end = end
        self._drain_s = drain_s
        self._clock = clock
        self._wanted = role
        self._is_wanted = asyncio.Event()
        self._leave_by: float | None = None

    def order(self, order: WorkerOrder) -> None:
        """Take an operator's order; of roles, and of deadlines, the last one counts."""
        _log.info("ordered: %s", order)
        match order:
            case DrainWorker(deadline_s):
                self._leave_by = self._clock.now() + deadline_s
                self._end.stop()
            case SwitchRole(role):
                self._wanted = role
                self._is_wanted.set()
            case _:
                assert_never(order)

    async def run(self) -> NoReturn:
        """Switch roles as ordered, until cancelled."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            if self._wanted is not self.role:
                await self._switch()

    async def leave(self) -> None:
        """Drain for good; `run` was cancelled before."""
        self._close()
        await self._empty(lambda: self._leave_by)

    async def _switch(self) -> None:
        if Role.PREFILL in (self.role, self._wanted):
            self._close()
            await self._empty(lambda: None)
        role = self._wanted
        # First in etcd: a router that still knows the old role would send what is refused.
        self._entry.update(role=role, is_draining=False)
        await self._entry.wait_registered()
        _log.info("role %s, after %s", role, self.role)
        self.role = role
        self._pools.serve_as(role)
        self._health.draining(is_draining=False)

    def _close(self) -> None:
        self._health.draining(is_draining=True)
        self._pools.drain()
        self._entry.update(is_draining=True)

    async def _empty(self, deadline: Callable[[], float | None]) -> None:
        """Return once nothing here is of use to anybody, or the deadline is over and what was left
        has been failed over. Who hurries waits for what runs only, and not for long."""
        pools, clock = self._pools, self._clock
        latest, hurry_by = clock.now() + self._drain_s, math.inf
        while True:
            is_hurried = self._end.is_hurried
            if not (pools.num_running if is_hurried else pools.num_open):
                return
            if is_hurried:
                hurry_by = min(hurry_by, clock.now() + HURRY_S)
            ordered = deadline()
            if clock.now() >= min(latest if ordered is None else ordered, hurry_by):
                break
            await asyncio.sleep(_POLL_S)
        if pools.num_running:
            _log.warning("%d requests and attempts are unfinished", pools.num_running)
            pools.fail_over()
            await asyncio.sleep(_FAIL_OVER_S)
