"""One run: a scenario from its start until everything is idle, or an invariant is violated."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec

from core.config import (
    Config,
    ControlPlaneConfig,
    DisaggregationConfig,
    EngineConfig,
    KvTransferConfig,
    RouterConfig,
)
from engine.executor.mock_pool import mock_layout
from kv_transfer.inprocess.model import Dice, Faults
from kv_transfer.transport import PeerName
from planner.protocol.blocks import BlockContents
from planner.protocol.client import Client, Ending
from planner.protocol.cluster import Cluster
from planner.protocol.etcd import Etcd
from planner.protocol.event_log import EventLog
from planner.protocol.faults import FaultInjector
from planner.protocol.idleness import gauge_errors, why_busy
from planner.protocol.invariants import EngineChecks, LandingChecks, Violation
from planner.protocol.network import Network
from planner.protocol.nic import Nic
from planner.protocol.process import Lane
from planner.protocol.router import Router
from planner.protocol.scenario import BLOCK_SIZE, Scenario
from planner.protocol.virtual_loop import VirtualLoop
from planner.protocol.worker import Worker
from planner.protocol.world import World

IDLE_WITHIN_S = 24.0
"""After the last fault: request patience, quarantine, fences and renewals included."""

_LOOK_S = 0.25
_CALM_S = 1.0
"""An idle cluster is watched for so much longer, for what comes late."""

_RETRY_S = 0.3


class Outcome(msgspec.Struct, frozen=True):
    """What a run showed.

    Attributes:
        endings: requests by how they ended.
        seconds: of virtual time.
    """

    scenario: Scenario
    violation: Violation | None
    endings: dict[Ending, int]
    digest: str
    tail: tuple[str, ...]
    seconds: float
    num_events: int


def simulate(scenario: Scenario, dice: Dice) -> Outcome:
    """Run a scenario.

    Args:
        scenario: what happens.
        dice: orders what is concurrent; equally seeded dice give equal outcomes.
    """
    return _Simulation(scenario, dice).run()


class _Simulation:
    def __init__(self, scenario: Scenario, dice: Dice) -> None:
        self._scenario = scenario
        self._violation: Violation | None = None
        config = _config(scenario)
        layout = mock_layout(config.engine.block_size)
        loop = VirtualLoop(self._loop_error)
        log = EventLog(loop.time)
        contents = BlockContents(layout, bytes.fromhex(layout.model))
        landings = LandingChecks(contents, self._agent_of, self._violated)
        self._agents: dict[PeerName, Worker] = {}
        self._world = World(
            config=config,
            loop=loop,
            dice=dice,
            log=log,
            network=Network(loop, dice, log, config.control_plane, scenario.latency),
            nic=Nic(
                loop=loop,
                dice=dice,
                log=log,
                faults=Faults(max_delay_s=scenario.descriptor_max_s),
                must_poll=scenario.must_poll,
                on_landed=landings.landed,
            ),
            etcd=Etcd(loop, dice, log, lease_s=config.control_plane.lease_s),
            contents=contents,
        )
        checks = EngineChecks(contents, self._violated)
        self._cluster = Cluster(self._world, scenario, checks, self._violated)

    def run(self) -> Outcome:
        """Run to the end."""
        world, cluster = self._world, self._cluster
        cluster.start()
        self._schedule()
        faults_end_s = max(
            (fault.at + fault.duration for fault in self._scenario.faults), default=0.0
        )
        self._run_until_idle(faults_end_s)
        self._check_end()
        log = world.log
        log.is_closed = True
        seconds, num_events = world.loop.time(), world.loop.num_events
        cluster.tear_down()
        return Outcome(
            scenario=self._scenario,
            violation=self._violation,
            endings=dict(Counter(c.ending for c in cluster.clients if c.ending is not None)),
            digest=log.digest(),
            tail=tuple(log.tail(60)) if self._violation else (),
            seconds=seconds,
            num_events=num_events,
        )

    # --- what happens -----------------------------------------------------------------------------

    def _schedule(self) -> None:
        injector = FaultInjector(self._world, self._cluster)
        for fault in self._scenario.faults:
            injector.schedule(fault)
        for number, plan in enumerate(self._scenario.requests):
            client = Client(number, plan, self._violated)
            self._cluster.clients.append(client)
            for index in range(plan.sampling.n):
                self._world.contents.expect((*plan.prompt, *client.expected[index]))
            self._world.loop.call_world(plan.at, self._begin, client)

    def _begin(self, client: Client) -> None:
        """A client connects; where no router is, it tries again."""
        routers, loop = self._cluster.routers, self._world.loop
        wanted = routers[client.plan.router]
        alive = [router for router in (wanted, *routers.values()) if router.process.is_alive]
        if not alive:
            loop.call_world(loop.time() + _RETRY_S, self._begin, client)
            return
        router = alive[0]
        self._world.log.add("client", f"asks {router.process}", client.number)
        client.connected(router.process)
        loop.call_in(router.process, Lane.MESSAGE, loop.time(), self._serve, client, router)

    def _serve(self, client: Client, router: Router) -> None:
        """In the router's process."""
        task = self._world.loop.create_task(router.serve(client))
        task.add_done_callback(lambda done: self._served(client, done))
        if client.plan.leaves_at is not None:
            self._world.loop.call_later(client.plan.leaves_at, client.leave)

    def _served(self, client: Client, task: asyncio.Task[None]) -> None:
        if not self._world.log.is_closed and (error := task.exception()):
            self._violated("crash", f"request {client.number}: {error!r}")
        ending = "-" if client.ending is None else client.ending.value
        text = f"{client.number}: {ending} {client.error or ''}"
        self._world.log.add("client", "ended", text)

    # --- until when -------------------------------------------------------------------------------

    def _run_until_idle(self, faults_end_s: float) -> None:
        """Run until the faults are over and nothing is left to do; look now and then."""
        loop, cluster = self._world.loop, self._cluster
        while loop.time() < faults_end_s + IDLE_WITHIN_S and not self._violation:
            loop.run_until(loop.time() + _LOOK_S)
            for reason in gauge_errors(cluster):
                self._violated("gauges", reason)
            if loop.time() < faults_end_s or next(why_busy(cluster), None) is not None:
                continue
            loop.run_until(loop.time() + _CALM_S)
            if next(why_busy(cluster), None) is None:
                return

    def _check_end(self) -> None:
        cluster = self._cluster
        if self._violation:
            return
        for reason in why_busy(cluster):
            self._violated("stuck", reason)
        for client in cluster.clients:
            if client.ending is Ending.REFUSED:
                self._violated("refused", f"request {client.number}: {client.error}")
        if self._scenario.is_quick:
            for worker in cluster.workers.values():
                if worker.num_fences:
                    self._violated("fenced", f"{worker.process} was fenced without a fault")

    def _agent_of(self, name: PeerName) -> Worker:
        agent = self._world.nic.agent(name)
        assert isinstance(agent, Worker)
        return agent

    def _violated(self, invariant: str, text: str) -> None:
        """Keep the first violation, and stop."""
        if self._violation is None and not self._world.log.is_closed:
            self._violation = Violation(invariant, text, self._world.loop.time())
            self._world.log.add("VIOLATION", invariant, text)
            self._world.loop.halt()

    def _loop_error(self, context: dict[str, Any]) -> None:
        self._violated("crash", f"{context.get('message')}: {context.get('exception')!r}")


def _config(scenario: Scenario) -> Config:
    """Return times short enough for a run of seconds, in the proportions of the defaults."""
    return Config(
        engine=EngineConfig(
            executor="mock",
            block_size=BLOCK_SIZE,
            chunk_tokens=scenario.chunk_tokens,
            max_inflight=scenario.max_inflight,
            max_slots=scenario.max_slots,
            max_waiting=scenario.max_waiting,
            mock_step_s=scenario.step_s,
            mock_prompt_token_s=scenario.step_s / 16,
        ),
        kv_transfer=KvTransferConfig(backend="inprocess", try_s=0.8, quarantine_s=0.4),
        control_plane=ControlPlaneConfig(heartbeat_s=0.25, suspect_s=0.5, lease_s=1.0, drain_s=2.0),
        router=RouterConfig(local_prefill_tokens=4),
        disaggregation=DisaggregationConfig(),
    )
