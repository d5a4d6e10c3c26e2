"""Carries out a scenario's faults, and undoes each when its time is over."""

from __future__ import annotations

from functools import partial

import msgspec

from core.messages import DrainWorker, SwitchRole
from planner.protocol.cluster import Cluster
from planner.protocol.scenario import Fault, FaultKind
from planner.protocol.world import World

_LOSS = 0.3
_NOTIFICATION_LOSS = 0.2


class FaultInjector:
    """Faults of one run. One that its target's state forbids (a dead process freezes) is skipped;
    what overlaps is undone once."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self._world = world
        self._cluster = cluster
        self._num_lossy = 0

    def schedule(self, fault: Fault) -> None:
        """Have a fault happen at its time."""
        self._world.loop.call_world(fault.at, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        end_at = self._world.loop.time() + fault.duration
        match fault.kind:
            case FaultKind.KILL:
                self._kill(fault, end_at)
            case FaultKind.FREEZE:
                self._freeze(fault, end_at)
            case FaultKind.PARTITION:
                self._cut(fault, end_at)
            case FaultKind.RESET:
                self._world.log.add(fault.target, "loses its connections to", fault.other)
                self._world.network.reset(fault.target, fault.other)
            case FaultKind.LOSSY:
                self._lose(1)
                self._world.loop.call_world(end_at, self._lose, -1)
            case FaultKind.ETCD_AWAY:
                self._etcd_away(fault, end_at)
            case FaultKind.LEASE_LOST:
                self._world.etcd.revoke(fault.target)
            case FaultKind.DRAIN | FaultKind.TERMINATE | FaultKind.SWITCH:
                self._order(fault, end_at)

    def _order(self, fault: Fault, end_at: float) -> None:
        """What an operator does is no fault, but comes as untimely."""
        if fault.kind is FaultKind.DRAIN:
            self._cluster.order(fault.target, DrainWorker(fault.duration))
        elif fault.kind is FaultKind.TERMINATE:
            self._cluster.terminate(fault.target)
        else:
            self._cluster.order(fault.target, SwitchRole(fault.role))
            self._world.loop.call_world(end_at, self._cluster.keep_first_role, fault.target)

    def _kill(self, fault: Fault, end_at: float) -> None:
        if self._cluster.is_alive(fault.target):
            self._cluster.kill(fault.target, fault.buffered)
            self._world.loop.call_world(end_at, self._cluster.restart, fault.target)

    def _freeze(self, fault: Fault, end_at: float) -> None:
        if self._cluster.is_running(fault.target):
            process = self._cluster.freeze(fault.target, fault.how)
            self._world.loop.call_world(end_at, self._cluster.thaw, process)

    def _cut(self, fault: Fault, end_at: float) -> None:
        source, target, world = fault.target, fault.other, self._world
        world.log.add(source, "cannot reach", target)
        if fault.hits_messages:
            world.network.cut(source, target)
        if fault.hits_writes:
            world.nic.cut(source, target)
        world.loop.call_world(end_at, self._heal, source, target)

    def _heal(self, source: str, target: str) -> None:
        self._world.log.add(source, "reaches again", target)
        self._world.network.heal(source, target)
        self._world.nic.heal(source, target)

    def _lose(self, change: int) -> None:
        self._num_lossy += change
        is_lossy = self._num_lossy > 0
        self._world.log.add("fabric", "loses" if is_lossy else "loses nothing any more")
        fabric = self._world.nic.fabric
        fabric.faults = msgspec.structs.replace(
            fabric.faults,
            loss=_LOSS if is_lossy else 0.0,
            notification_loss=_NOTIFICATION_LOSS if is_lossy else 0.0,
        )

    def _etcd_away(self, fault: Fault, end_at: float) -> None:
        if not self._world.etcd.is_away:
            self._world.etcd.leave()
            back = partial(self._world.etcd.come_back, forgot=fault.forgets)
            self._world.loop.call_world(end_at, back)
