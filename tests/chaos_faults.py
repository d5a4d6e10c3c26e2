"""What befalls a cluster while requests run: the lines of a table in random order, over and over.

Somebody must be left to serve: of decode workers, and of routers, one is spared while another is
struck. Prefill workers may all be gone, and etcd too; but no operator sends the last one away.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from core.clock import Clock
from core.worker_record import Role
from tests.chaos_cluster import TRY_S, ChaosCluster

ETCD = "etcd"

_DEAD_S = (0.0, 1.0)

_IN_ANOTHER_ROLE_S = (1.0, 4.0)

_NEVER = float("inf")


class What(enum.StrEnum):
    """What is done to a process."""

    KILL = "kill"
    STOP = "stop"
    FREEZE = "freeze"
    FREEZE_LONG = "freeze long"
    RESTART = "restart"
    EMPTY = "restart empty"
    REVOKE = "revoke lease"
    DRAIN = "drain"
    SWITCH = "switch role"


class Entry(NamedTuple):
    """One line of the table of faults.

    Attributes:
        role: "prefill", "decode", "router", "etcd".
        frozen_s: how long it is frozen, from and to.
    """

    role: str
    what: What
    frozen_s: tuple[float, float] = (1.0, 6.0)


_ORDERS = (What.DRAIN, What.SWITCH)
_WORKERS = ("prefill", "decode")
_PROCESSES = (*_WORKERS, "router")
TABLE = (
    *(Entry(role, what) for role in _PROCESSES for what in (What.KILL, What.STOP, What.FREEZE)),
    Entry(ETCD, What.FREEZE, (3.0, 3.0)),
    Entry(ETCD, What.FREEZE_LONG, (15.0, 15.0)),
    Entry(ETCD, What.RESTART),
    Entry(ETCD, What.EMPTY),
    Entry(ETCD, What.REVOKE),
    *(Entry(role, what) for role in _WORKERS for what in (What.DRAIN, What.SWITCH)),
)
"""SIGKILL, SIGTERM and SIGSTOP of each process; etcd frozen, killed and started again with its data
and without, and a worker's lease revoked; a worker drained by order, and put into another role for
a while."""

OUTAGE_TABLE = tuple(
    entry._replace(frozen_s=(60.0, 60.0)) if entry.what is What.FREEZE_LONG else entry
    for entry in TABLE
)
"""With etcd frozen for a minute at a time."""

PREFILL_TABLE = (
    Entry("prefill", What.KILL),
    Entry("prefill", What.FREEZE, (3.0, 3.0)),
    Entry("prefill", What.FREEZE, (TRY_S, TRY_S + 0.3)),
)
"""Frozen longer than a fence is waited for, so that it thaws into a sink; or just given up."""


class Strike(NamedTuple):
    """One thing that befell a process, and when; `ended` once all others have it back."""

    victim: str
    what: What
    began: float
    ended: float = _NEVER

    @property
    def ends_connections(self) -> bool:
        """Whether the victim ends what it has not answered."""
        return self.what in (What.KILL, What.STOP)

    def overlaps(self, began: float, ended: float) -> bool:
        """Whether anything of that time lies within it."""
        return self.began <= ended and began <= self.ended


class Strikes:
    """Strikes until the event is set; then everyone lives and runs again.

    Attributes:
        done: all strikes so far, those under way too, as they began.

    Args:
        every_s: seconds between strikes, from and to.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        dice: random.Random,
        clock: Clock,
        *,
        table: Sequence[Entry] = TABLE,
        every_s: tuple[float, float] = (3.0, 3.0),
    ) -> None:
        self.done: list[Strike] = []
        self._cluster = cluster
        self._dice = dice
        self._clock = clock
        self._table = table
        self._every_s = every_s
        self._deck: list[Entry] = []
        self._struck: set[str] = set()
        self._passing_on: set[str] = set()
        shape = cluster.shape
        self._names = {
            "prefill": shape.prefills,
            "decode": shape.decodes,
            "router": shape.routers,
            ETCD: (ETCD,),
        }

    @property
    def counts(self) -> Counter[str]:
        """Strikes so far by what and whom."""
        return Counter(f"{one.what} {one.victim.partition('-')[0]}" for one in self.done)

    def routers(self) -> list[str]:
        """Return the routers that a load balancer would send to: those that are not being ended, or
        just started."""
        gone = {one.victim for one in self.done if one.ends_connections and one.ended == _NEVER}
        return [name for name in self._cluster.shape.routers if name not in gone]

    async def run(self, are_over: asyncio.Event) -> None:
        """See the class."""
        first_s, last_s = self._every_s
        wait_s = self._dice.uniform(0.1 * first_s, 0.8 * first_s)
        async with asyncio.TaskGroup() as group:
            while not await _is_set_within(are_over, wait_s):
                self._strike(group)
                wait_s = self._dice.uniform(first_s, last_s)

    def _strike(self, group: asyncio.TaskGroup) -> None:
        """Carry out the first entry left of the table that has a victim now."""
        if not self._deck:
            self._deck = self._dice.sample(self._table, len(self._table))
        for entry in self._deck:
            victim = self._dice.choice(self._names[entry.role])
            if self._may_be_struck(victim, entry):
                self._deck.remove(entry)
                group.create_task(self._carry_out(victim, entry), name=f"{entry.what} {victim}")
                return

    def _may_be_struck(self, victim: str, entry: Entry) -> bool:
        if victim in self._struck | self._passing_on:
            return False
        others = set(self._names[entry.role]) - {victim} - self._struck
        is_needed = entry.role not in ("prefill", ETCD) or entry.what in _ORDERS
        return bool(others) or not is_needed

    async def _carry_out(self, victim: str, entry: Entry) -> None:
        number = len(self.done)
        self.done.append(Strike(victim, entry.what, self._clock.now()))
        self._struck.add(victim)
        match entry.what:
            case What.FREEZE | What.FREEZE_LONG:
                await self._freeze(victim, self._dice.uniform(*entry.frozen_s))
            case What.KILL:
                self._cluster.kill(victim)
                await self._begin_again(victim)
            case What.STOP:
                await asyncio.to_thread(self._cluster.terminate, victim)
                await self._begin_again(victim)
            case What.RESTART | What.EMPTY:
                is_empty = entry.what is What.EMPTY
                await asyncio.to_thread(self._cluster.etcd.restart, empty=is_empty)
            case What.REVOKE:
                await asyncio.to_thread(self._revoke)
            case What.DRAIN:
                await self._order("drain", worker=victim)
                await asyncio.to_thread(self._cluster.wait_left, victim)
                await self._begin_again(victim)
            case What.SWITCH:
                await self._switch_for_a_while(victim, Role(entry.role))
        self._struck.remove(victim)
        self.done[number] = self.done[number]._replace(ended=self._clock.now())

    async def _freeze(self, victim: str, frozen_s: float) -> None:
        cluster = self._cluster
        if victim == ETCD:
            cluster.etcd.freeze()
            await asyncio.sleep(frozen_s)
            cluster.etcd.thaw()
            return
        cluster.freeze(victim)
        await asyncio.sleep(frozen_s)
        cluster.thaw(victim)
        if victim in cluster.workers:
            await self._until_known(victim)

    async def _begin_again(self, victim: str) -> None:
        await asyncio.sleep(self._dice.uniform(*_DEAD_S))
        self._cluster.start(victim)
        await asyncio.to_thread(self._cluster.wait_ready, victim)
        if victim in self._cluster.workers:
            await self._until_known(victim)
        else:
            await asyncio.to_thread(self._cluster.wait_serving, victim)

    async def _switch_for_a_while(self, worker: str, own: Role) -> None:
        another = self._dice.choice([role for role in Role if role is not own])
        for role in (another, own):
            await self._order("role", worker=worker, role=role)
            await self._until_known(worker, role)
            if role is not own:
                await asyncio.sleep(self._dice.uniform(*_IN_ANOTHER_ROLE_S))

    async def _order(self, order: str, **body: str) -> None:
        """Have a router that runs pass an operator's order on; it is spared meanwhile."""
        router = self._running_router()
        self._passing_on.add(router)
        await asyncio.to_thread(self._cluster.order, router, order, body)
        self._passing_on.discard(router)

    async def _until_known(self, worker: str, role: Role | None = None) -> None:
        """Return once a router that runs sends to a worker's present life: until then, no other of
        its role may be struck."""
        await asyncio.to_thread(self._cluster.wait_known, self._running_router(), worker, role)

    def _running_router(self) -> str:
        return next(name for name in self.routers() if name not in self._struck)

    def _revoke(self) -> None:
        _, *leases = self._cluster.etcd.ctl("lease", "list").splitlines()
        if leases:
            self._cluster.etcd.ctl("lease", "revoke", self._dice.choice(leases))


async def _is_set_within(event: asyncio.Event, wait_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True
