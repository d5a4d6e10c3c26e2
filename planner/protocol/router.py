"""One life of a router's process: the real dispatcher over the simulated network and etcd."""

from __future__ import annotations

from typing import Any

from control_plane.rpc.interface import Stream, StreamListener
from core.clock import Clock
from core.config import ControlPlaneConfig
from core.ids import Boot
from core.worker_record import Hello
from engine.executor.mock_pool import mock_layout
from planner.protocol.client import Client
from planner.protocol.process import Process, ProcessClock
from planner.protocol.world import World
from router.dispatch.dispatcher import RouterDispatcher
from router.dispatch.request_state import RetryRules

RULES = RetryRules(
    fresh_patience_s=8.0,
    refused_patience_s=8.0,
    lost_patience_s=15.0,
    suspect_grace_s=0.2,
    silence_s=1.0,
    max_lost=20,
)
"""Patient: in a run every worker comes back, so a request that gives up would hide a fault."""


class Router:
    """Its dispatcher serves once `main` runs in `process.context`."""

    def __init__(self, world: World, process: Process) -> None:
        self.process = process
        self._world = world
        self.dispatcher = RouterDispatcher(
            world.config,
            hello=Hello(
                kind="router",
                name=process.name,
                boot=Boot(str(process)),
                model_fingerprint=mock_layout(world.config.engine.block_size).model,
            ),
            connect=self._connect,
            clock=ProcessClock(world.loop.time, process),
            rng=world.dice,
            rules=RULES,
        )

    async def main(self) -> None:
        """Serve until the process ends."""
        self._world.etcd.watch(self.process, self.dispatcher)
        await self.dispatcher.run()

    async def serve(self, client: Client) -> None:
        """What the HTTP layer does for one request."""
        await client.run(self.dispatcher)

    async def _connect(
        self,
        address: str,
        hello: Hello,
        listener: StreamListener[Any],
        *,
        config: ControlPlaneConfig,
        clock: Clock,
    ) -> Stream[Any]:
        del config, clock  # the network has its own
        return await self._world.network.connect(self.process, address, hello, listener)
