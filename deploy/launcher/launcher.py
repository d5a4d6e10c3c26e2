"""`dovetail up`: a whole cluster on this machine, in the foreground.

    etcd -> workers and routers, in parallel -> one chat request -> ready -> (restarts) -> stop:
    routers, then workers, then etcd

Every component is a child process of its own session, so that the terminal's Ctrl-C reaches the
launcher alone, and dies with the launcher whatever kills it. The first Ctrl-C or SIGTERM stops in
order, a second one kills.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from core.clock import Clock
from core.config import Config
from core.environment import temporary_directory
from core.errors import DovetailError, UsageError
from deploy.address import claim_ports, reachable_url
from deploy.api_client import ApiAddress, ApiClient
from deploy.launcher.component import Component
from deploy.launcher.cpu_shares import share_cpus
from deploy.launcher.etcd_component import EtcdComponent
from deploy.launcher.first_request import ask, describe, wait_until_ready
from deploy.launcher.plan import ComponentSpec, plan_routers, plan_workers
from deploy.launcher.run_directory import RunDirectory
from deploy.launcher.welcome import welcome
from deploy.options import UpOptions
from deploy.settings import to_toml
from deploy.terminal import complain, say

# -P: a folder named `core` or `router` where the user happens to be must not be imported.
PROGRAM = (sys.executable, "-P", "-m", "deploy")
"""How a child of this program is started."""

ROUTER_GRACE_S = 10.0
WORKER_GRACE_S = 10.0
DISCOVERY_TIMEOUT_S = 30.0
"""From the last component's readiness until the router must have found the workers."""


class Launcher:
    """Owns the components; `serve` until cancelled, then `stop`.

    Args:
        ports: one a router.
        run_directory: for etcd's data and the configuration of the children.
        program: what the children run; see `PROGRAM`.
    """

    def __init__(
        self,
        config: Config,
        options: UpOptions,
        *,
        ports: Sequence[int],
        run_directory: Path,
        clock: Clock,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._program = program
        self._ports = ports
        self._config = config
        self._options = options
        self._run_directory = run_directory
        self._clock = clock
        self._rng = random.SystemRandom()
        self._etcd: EtcdComponent | None = None
        self._routers: list[Component] = []
        self._workers: list[Component] = []

    async def serve(self) -> None:
        """Start everything, prove that it answers, and keep it alive until cancelled.

        Raises:
            UsageError: a component refused to start for a user's slip.
            DovetailError: a component did not become ready, or the first request failed.
        """
        started = self._clock.now()
        config_file = self._write_config(await self._etcd_endpoints())
        self._make_components(config_file)
        components = self._components()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._etcd is not None:
                    tasks.create_task(self._etcd.keep_alive(), name="etcd")
                for component in components:
                    tasks.create_task(component.keep_alive(), name=component.name)
                await asyncio.gather(*(component.ready.wait() for component in components))
                await self._prove(started)
        except* DovetailError as group:
            raise _first_leaf(group) from None

    async def stop(self) -> None:
        """Stop routers, then workers, then etcd; each is killed after its grace."""
        await asyncio.gather(*(router.stop(ROUTER_GRACE_S) for router in self._routers))
        # Not SIGTERM, a drain of up to a minute: there is nobody to hand requests to. Nor SIGINT,
        # to which a child that is still being loaded answers with a traceback; nor SIGHUP, which
        # UCX takes for itself.
        stops = (worker.stop(WORKER_GRACE_S, signal.SIGUSR1) for worker in self._workers)
        await asyncio.gather(*stops)
        if self._etcd is not None:
            await self._etcd.stop()

    def kill(self) -> None:
        """End every component at once; `stop` then only collects them."""
        for component in self._components():
            component.kill()
        if self._etcd is not None:
            self._etcd.kill()

    def _components(self) -> list[Component]:
        return [*self._workers, *self._routers]

    async def _etcd_endpoints(self) -> str:
        """Return the user's etcd, or start one."""
        if self._config.control_plane.etcd:
            return self._config.control_plane.etcd
        log_directory = self._options.log_directory or self._run_directory
        self._etcd = EtcdComponent(
            self._run_directory / "etcd",
            log_path=log_directory / "etcd.log",
            clock=self._clock,
            rng=self._rng,
        )
        await self._etcd.start()
        return self._etcd.endpoint

    def _write_config(self, etcd: str) -> Path:
        """Write what every child is started with; private, for it may hold API keys."""
        control_plane = msgspec.structs.replace(self._config.control_plane, etcd=etcd)
        self._config = msgspec.structs.replace(self._config, control_plane=control_plane)
        file = self._run_directory / "config.toml"
        file.touch(mode=0o600)
        file.write_text(to_toml(self._config), encoding="utf-8")
        return file

    def _make_components(self, config_file: Path) -> None:
        base = (*self._program, "--parent-pid", str(os.getpid()))
        cpus = sorted(os.sched_getaffinity(0))
        shares = share_cpus(cpus, self._options.num_workers, self._config.engine.threads)
        workers = plan_workers(self._options, base, config_file, shares)
        self._workers = [self._component(spec) for spec in workers]
        routers = plan_routers(self._options, base, config_file, self._ports)
        self._routers = [self._component(spec) for spec in routers]

    def _component(self, spec: ComponentSpec) -> Component:
        directory = self._options.log_directory
        log_file = directory / f"{spec.name}.log" if directory is not None else None
        return Component(spec, clock=self._clock, rng=self._rng, log_file=log_file)

    async def _prove(self, started: float) -> None:
        http, api = self._config.http, self._config.api
        urls = [reachable_url(http.host, port) for port in self._ports]
        key = api.keys[0] if api.keys else ""
        clients = [ApiClient(ApiAddress(url, api_key=key)) for url in urls]
        for client in clients:
            await wait_until_ready(client, timeout_s=DISCOVERY_TIMEOUT_S, clock=self._clock)
        client = clients[0]
        model = await asyncio.to_thread(client.model)
        through_fabric = self._options.num_prefill > 0
        answer = await asyncio.to_thread(
            ask, client, model, through_fabric=through_fabric, clock=self._clock
        )
        for line in describe(answer):
            say(line)
        seconds = self._clock.now() - started
        for line in welcome(urls, model, has_keys=bool(api.keys), seconds=seconds):
            say(line)


class _Interrupts:
    """First signal: stop. Second: kill.

    Attributes:
        exit_code: 0 for an orderly stop; after a kill 128 and the signal's number, as shells have
            it: 130 for Ctrl-C.
    """

    def __init__(self, serving: asyncio.Task[None], launcher: Launcher) -> None:
        self._serving = serving
        self._launcher = launcher
        self._count = 0
        self.exit_code = 0

    def __call__(self, number: signal.Signals) -> None:
        self._count += 1
        if self._count == 1:
            say("stopping    routers, workers, etcd (once more kills them)")
            self._serving.cancel()
        else:
            self.exit_code = 128 + number
            self._launcher.kill()


async def run_up(
    config: Config, options: UpOptions, *, clock: Clock, program: Sequence[str] = PROGRAM
) -> int:
    """Run a cluster until Ctrl-C, SIGTERM or SIGHUP; return the exit code.

    Raises:
        UsageError: before anything starts (a port in use), or from a component; all is stopped.
        DovetailError: the cluster did not come up; all is stopped.
    """
    http = config.http
    with claim_ports(http.host, http.port, options.num_routers) as ports:
        _make_log_directory(options.log_directory)
        with RunDirectory(temporary_directory()) as run_directory:
            launcher = Launcher(
                config,
                options,
                ports=ports,
                run_directory=run_directory.path,
                clock=clock,
                program=program,
            )
            return await _run(launcher)


async def _run(launcher: Launcher) -> int:
    serving = asyncio.create_task(launcher.serve())
    interrupts = _Interrupts(serving, launcher)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupts, number)
    try:
        # Not `await serving`: its cancellation by a signal is a normal end, not ours.
        await asyncio.wait([serving])
    finally:
        await launcher.stop()
    if serving.cancelled():
        say("killed" if interrupts.exit_code else "stopped")
        return interrupts.exit_code
    serving.result()
    complain("the cluster ended by itself")  # unreachable while `serve` keeps its promise
    return 1


def _make_log_directory(directory: Path | None) -> None:
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"--log-dir {directory}: {error.strerror}"
        raise UsageError(msg) from None


def _first_leaf(group: BaseExceptionGroup[DovetailError]) -> DovetailError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, DovetailError)
    return error
