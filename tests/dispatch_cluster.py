"""A dispatcher with workers of `tests.dispatch_workers`, and clients that check what they get."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from control_plane.registry import WorkerSeen, WorkerSuspect
from control_plane.rpc.refusals import PeersRefused
from core.clock import SystemClock
from core.config import Config
from core.ids import RequestId, new_boot
from core.lifetime import Lifetime
from core.messages import WorkerToRouter
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core.worker_record import Hello, Role
from router.dispatch.dispatcher import RouterDispatcher
from router.dispatch.interface import GenerateRequest
from router.dispatch.request_state import RetryRules
from router.dispatch.token_stream import RequestStream
from router.dispatch.worker_link import WorkerLink
from tests.dispatch_workers import CONFIG, FINGERPRINT, FakeWorker, News, token

RULES = RetryRules(
    first_wait_s=0.01,
    max_wait_s=0.05,
    fresh_patience_s=0.1,
    refused_patience_s=0.2,
    lost_patience_s=0.5,
    suspect_grace_s=0.05,
    silence_s=0.1,
)


class WatchedDispatcher(RouterDispatcher):
    """Tells the tests when something happened."""

    news: News

    def link_opened(self, link: WorkerLink) -> None:
        super().link_opened(link)
        self.news.happened()

    def link_message(self, link: WorkerLink, message: WorkerToRouter) -> None:
        super().link_message(link, message)
        self.news.happened()


class Cluster:
    """A dispatcher and its workers."""

    def __init__(self, network: Any, config: Config = CONFIG, rules: RetryRules = RULES) -> None:
        self.network = network
        self.workers: list[FakeWorker] = []
        self.refused = PeersRefused()
        self.dispatcher = WatchedDispatcher(
            config,
            hello=Hello("router", "router", new_boot(), model_fingerprint=FINGERPRINT),
            connect=network.connect,
            clock=SystemClock(),
            rng=random.Random(7),
            rules=rules,
            refused=self.refused,
        )
        self.news: News = network.news
        self.dispatcher.news = self.news

    async def until(self, condition: Callable[[], bool]) -> None:
        await self.news.until(condition)

    async def add(self, name: str, role: Role) -> FakeWorker:
        worker = await self.network.add(name, role)
        self.workers.append(worker)
        self.register()
        await self.until(
            lambda: any(w["id"] == name and w["state"] == "live" for w in self.status())
        )
        await self.until(lambda: worker.stream is not None)
        return worker

    def register(self) -> None:
        for worker in self.workers:
            self.dispatcher.on_worker_change(WorkerSeen(worker.record()))

    def unregister(self) -> None:
        for worker in self.workers:
            self.dispatcher.on_worker_change(WorkerSuspect(worker.name, worker.boot))

    def status(self) -> list[dict[str, Any]]:
        found: Any = self.dispatcher.cluster_status()["workers"]
        return found

    def start(self, request_id: str, *prompt: int, **changes: Any) -> RequestStream:
        sampling = SamplingParams(
            n=changes.pop("n", 1),
            max_tokens=changes.pop("max_tokens", 5),
            seed=1,
            prompt_logprobs=changes.pop("prompt_logprobs", None),
        )
        request = EngineRequest(RequestId(request_id), prompt or tuple(range(100)), sampling)
        generate = GenerateRequest(request, timeout_s=5.0)
        return self.dispatcher.start(msgspec.structs.replace(generate, **changes), Lifetime())

    async def until_one_has(self, request_id: str, besides: FakeWorker | None = None) -> None:
        await self.until(
            lambda: any(request_id in w.jobs for w in self.workers if w is not besides)
        )

    def find(self, request_id: str, besides: FakeWorker | None = None) -> FakeWorker:
        """Return the worker that has a request."""
        return next(w for w in self.workers if request_id in w.jobs and w is not besides)


@contextlib.asynccontextmanager
async def running(
    network: Any, config: Config = CONFIG, rules: RetryRules = RULES
) -> AsyncGenerator[Cluster]:
    cluster = Cluster(network, config, rules)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        run = group.create_task(cluster.dispatcher.run())
        try:
            yield cluster
            assert cluster.dispatcher.num_requests() == 0, "nothing is left in flight"
        finally:
            await cluster.dispatcher.stop()
            await run
            await network.stop()


async def read(stream: RequestStream, num_samples: int = 1) -> list[list[int]]:
    """Read to the end; every update must go on where the last ended."""
    outputs: list[list[int]] = [[] for _ in range(num_samples)]
    async for updates in stream:
        for update in updates:
            assert update.start_index == len(outputs[update.sample_index])
            outputs[update.sample_index].extend(update.token_ids)
    return outputs


def expected(num_tokens: int, sample: int = 0) -> list[int]:
    return [token(tuple(range(100)), sample, index) for index in range(num_tokens)]


async def settle() -> None:
    """Let what was sent in memory arrive and be answered."""
    for _ in range(10):
        await asyncio.sleep(0)
