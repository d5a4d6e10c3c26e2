"""All processes of a run: started, killed, frozen, thawed and started again under their names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from core.worker_record import Role
from kv_transfer.inprocess.model import Frozen
from planner.protocol.client import Client
from planner.protocol.process import Lane, Process
from planner.protocol.router import Router
from planner.protocol.scenario import DECODES, PREFILLS, ROUTER, Scenario
from planner.protocol.worker import Checks, Worker
from planner.protocol.world import World

_THAW_MAX_S = 0.02
"""How far apart the parts of a process wake up."""


class Cluster:
    """Two prefill workers, two decode workers, one router.

    Args:
        checks: look at the workers' engines.
        violated: told of processes that end by themselves.
    """

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        checks: Checks,
        violated: Callable[[str, str], None],
    ) -> None:
        self._world = world
        self._scenario = scenario
        self._checks = checks
        self._violated = violated
        self._lives: dict[str, int] = {}
        self._is_over = False
        self.processes: list[Process] = []
        self.workers: dict[str, Worker] = {}
        self.router: Router
        self.clients: list[Client] = []

    def start(self) -> None:
        """Start everybody."""
        for name in (*PREFILLS, *DECODES, ROUTER):
            self._start(name)

    def is_running(self, name: str) -> bool:
        """Whether a process of this name runs."""
        return self._process(name).is_running

    def is_alive(self, name: str) -> bool:
        """Whether a process of this name runs, or stands still."""
        return self._process(name).is_alive

    def tear_down(self) -> None:
        """End everything; nothing that happens from now on counts."""
        self._is_over = True
        self._world.loop.tear_down(self.processes)

    # --- faults -----------------------------------------------------------------------------------

    def kill(self, name: str, buffered: int) -> None:
        """End a process, as SIGKILL does."""
        world, process = self._world, self._process(name)
        world.log.add(name, "is killed")
        world.loop.kill(process)
        worker = self.workers.get(name)
        if worker is not None:
            world.nic.kill(worker.agent, buffered_descriptors=buffered)
            world.etcd.stopped(process)
        else:
            for client in self.clients:
                client.router_died()
        world.network.died(process)

    def restart(self, name: str) -> None:
        """Start a process again: another life of the same name."""
        self._start(name)

    def freeze(self, name: str, how: Frozen) -> Process:
        """Stop a process, as SIGSTOP does; returns it."""
        world, process = self._world, self._process(name)
        world.log.add(name, "freezes", how.value)
        world.loop.freeze(process)
        worker = self.workers.get(name)
        if worker is not None:
            world.nic.freeze(worker.agent, how)
            world.etcd.stopped(process)
        world.network.froze(process)
        return process

    def thaw(self, process: Process) -> None:
        """Let it go on, unless it died meanwhile."""
        world, name = self._world, process.name
        if not process.is_alive:
            return
        world.log.add(name, "thaws")
        offsets = {lane: world.dice.uniform(0.0, _THAW_MAX_S) for lane in Lane}
        world.loop.thaw(process, offsets)
        worker = self.workers.get(name)
        if worker is not None:
            world.nic.thaw(worker.agent)
            world.etcd.thawed(process)
        world.network.thawed(process)

    # --- processes --------------------------------------------------------------------------------

    def _process(self, name: str) -> Process:
        worker = self.workers.get(name)
        return self.router.process if worker is None else worker.process

    def _start(self, name: str) -> None:
        world, scenario = self._world, self._scenario
        life = self._lives[name] = self._lives.get(name, 0) + 1
        process = Process(name, life, clock_offset=world.dice.uniform(0.0, 1000.0))
        self.processes.append(process)
        world.log.add(name, "starts", life)
        if name == ROUTER:
            self.router = Router(world, process)
            self._spawn(process, self.router.main)
            return
        is_prefill = name in PREFILLS
        role = Role.PREFILL if is_prefill else Role.DECODE
        num_blocks = scenario.prefill_blocks if is_prefill else scenario.decode_blocks
        worker = self.workers[name] = Worker(world, role, process, num_blocks, self._checks)
        self._spawn(process, worker.main)

    def _spawn(self, process: Process, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def begin() -> None:
            if self._is_over:
                return
            task = self._world.loop.create_task(main(), name=str(process), context=process.context)
            task.add_done_callback(self._ended)

        loop = self._world.loop
        loop.call_in(process, Lane.LOOP, loop.time() + self._world.dice.uniform(0.0, 0.1), begin)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self._is_over:
            error = None if task.cancelled() else task.exception()
            self._violated("crash", f"{task.get_name()} ended: {_cause(error)}")


def _cause(error: BaseException | None) -> str:
    """Describe what is inside of the groups that task groups make of one failure."""
    match error:
        case BaseExceptionGroup(exceptions=[BaseException() as first, *_]):
            return _cause(first)
        case _:
            return repr(error)
