"""All processes of a run: started, killed, frozen, ordered to leave, started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from core.errors import RequestError
from core.ids import WorkerId
from core.messages import SwitchRole, WorkerOrder
from core.worker_record import Role
from kv_transfer.inprocess.model import Frozen
from planner.protocol.client import Client
from planner.protocol.process import Lane, Process
from planner.protocol.router import Router
from planner.protocol.scenario import DECODES, PREFILLS, ROUTERS, Scenario
from planner.protocol.worker import Checks, Worker
from planner.protocol.world import World

_THAW_MAX_S = 0.02
"""How far apart the parts of a process wake up."""

_LOOK_S = 0.3
"""Between an operator's looks at a worker's role."""

_REPLACED_MAX_S = 0.5
"""From a worker's leaving until its next life starts."""


class Cluster:
    """Two prefill workers, two decode workers, two routers.

    Args:
        checks: look at the workers' engines, and at those that leave.
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
        self.routers: dict[str, Router] = {}
        self.clients: list[Client] = []

    def start(self) -> None:
        """Start everybody."""
        for name in (*PREFILLS, *DECODES, *ROUTERS):
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
                client.router_died(process)
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

    # --- orders -----------------------------------------------------------------------------------

    def terminate(self, name: str) -> None:
        """Have a process leave, as SIGTERM does."""
        worker = self.workers[name]
        if worker.process.is_running:
            self._world.log.add(name, "is told to leave")
            worker.process.context.run(worker.terminate)

    def order(self, name: str, order: WorkerOrder) -> None:
        """Have any router pass on an operator's order, which none may be able to at present."""
        loop = self._world.loop
        running = [router for router in self.routers.values() if router.process.is_running]
        if running:
            router = running[self._world.dice.randrange(len(running))]
            passes_on = partial(self._pass_on, router, name, order)
            loop.call_in(router.process, Lane.MESSAGE, loop.time(), passes_on)

    def keep_first_role(self, name: str) -> None:
        """From now on, order a worker to its first role whenever it is to have another: orders may
        be lost, or come late, one after a later one."""
        worker, loop = self.workers[name], self._world.loop
        if worker.process.is_alive and worker.wanted_role is not worker.record.role:
            self.order(name, SwitchRole(worker.record.role))
        loop.call_world(loop.time() + _LOOK_S, self.keep_first_role, name)

    def _pass_on(self, router: Router, name: str, order: WorkerOrder) -> None:
        self._world.log.add(str(router.process), "is to tell", f"{name} {order}")
        try:
            router.dispatcher.order(WorkerId(name), order, is_forced=True)
        except RequestError as error:
            self._world.log.add(str(router.process), "cannot tell", error)

    def _left(self, worker: Worker) -> None:
        """In the worker's process, at its end."""
        world, process = self._world, worker.process
        world.log.add(process.name, "has left")
        self._checks.has_left(worker)
        world.network.left(process)
        world.loop.kill(process)
        world.nic.kill(worker.agent, buffered_descriptors=world.dice.randrange(4))
        world.etcd.left(process)
        world.etcd.stopped(process)
        world.network.died(process)
        at = world.loop.time() + world.dice.uniform(0.0, _REPLACED_MAX_S)
        world.loop.call_world(at, self._start, process.name)

    # --- processes --------------------------------------------------------------------------------

    def _process(self, name: str) -> Process:
        return (self.workers.get(name) or self.routers[name]).process

    def _start(self, name: str) -> None:
        world, scenario = self._world, self._scenario
        life = self._lives[name] = self._lives.get(name, 0) + 1
        process = Process(name, life, clock_offset=world.dice.uniform(0.0, 1000.0))
        self.processes.append(process)
        world.log.add(name, "starts", life)
        if name in ROUTERS:
            router = self.routers[name] = Router(world, process)
            self._spawn(process, router.main)
            return
        is_prefill = name in PREFILLS
        role = Role.PREFILL if is_prefill else Role.DECODE
        num_blocks = scenario.prefill_blocks if is_prefill else scenario.decode_blocks
        worker = self.workers[name] = Worker(
            world, role, process, num_blocks, self._checks, self._left
        )
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
