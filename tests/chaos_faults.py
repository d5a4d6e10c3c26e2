"""What befalls prefill workers while requests run: every second or two one is killed or frozen."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from tests.chaos_cluster import PREFILLS, TRY_S, ChaosCluster

_LONG_S = 3.0
"""Longer than heartbeats may be missing, and than a fence is waited for: it thaws into a sink."""


class Strikes:
    """Strikes until the event is set; then everyone lives and runs again.

    Attributes:
        counts: kills and freezes so far.
    """

    def __init__(self, cluster: ChaosCluster, dice: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._dice = dice
        self._dead: set[str] = set()
        self._frozen: set[str] = set()

    async def run(self, are_over: asyncio.Event) -> None:
        """See the class."""
        wait_s = self._dice.uniform(0.1, 0.8)
        async with asyncio.TaskGroup() as group:
            while not await _is_set_within(are_over, wait_s):
                self._strike(group)
                wait_s = self._dice.uniform(1.0, 2.0)

    def _strike(self, group: asyncio.TaskGroup) -> None:
        victim = self._dice.choice(PREFILLS)
        is_kill = self._dice.random() < 0.5
        if victim in self._dead or (victim in self._frozen and not is_kill):
            return
        if is_kill:
            self.counts["kills"] += 1
            group.create_task(self._kill(victim, self._dice.uniform(0.0, 0.5)))
        else:
            self.counts["freezes"] += 1
            given_up_s = self._dice.uniform(TRY_S, TRY_S + 0.3)
            group.create_task(self._freeze(victim, self._dice.choice((_LONG_S, given_up_s))))

    async def _kill(self, victim: str, dead_s: float) -> None:
        self._dead.add(victim)
        self._cluster.kill(victim)
        await asyncio.sleep(dead_s)
        self._cluster.start(victim)
        await asyncio.to_thread(self._cluster.wait_ready, victim)
        self._dead.remove(victim)

    async def _freeze(self, victim: str, frozen_s: float) -> None:
        self._frozen.add(victim)
        self._cluster.freeze(victim)
        await asyncio.sleep(frozen_s)
        self._cluster.thaw(victim)
        self._frozen.remove(victim)


async def _is_set_within(event: asyncio.Event, wait_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True
