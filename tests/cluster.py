"""Real clusters, started by the command that a user types and stopped as a user stops them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from core.clock import SystemClock
from tests.launched import Launched
from tests.scrape import BLOCK_STATES, IN_USE, Scrape

START_TIMEOUT_S = 120.0
"""Generous: the machine that tests run on may be busy. What a start may take is a benchmark."""

PATIENT = ("--set", "control_plane.suspect_s=60")
"""For tests that count: a busy machine's late heartbeats must not cause a second dispatch."""

REQUEST_TIMEOUT_S = 120.0

IDLE_WITHIN_S = 2.0
"""From a request's end, or its client's leaving, until no worker holds a block for it."""

_IDLE_SCRAPES = 40
"""A machine that is too busy to answer so many scrapes meanwhile gets the time to."""


class Cluster:
    """One `dovetail up` that is ready.

    Attributes:
        url: of the router, without `/v1`.
        model: name of the served model.
        launched: the launcher's process and its lines.
        http: keeps connections to the cluster; what it sends has no base URL.
    """

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        ready = launched.wait_for(r"^ready +(\S+)/v1 +serves (\S+),", START_TIMEOUT_S)
        self.url, self.model = ready[1], ready[2]
        self.http = httpx.Client(trust_env=False, timeout=REQUEST_TIMEOUT_S)

    def close(self) -> None:
        """Close `http`'s connections."""
        self.http.close()

    def client(self) -> OpenAI:
        """Return the official client, pointed here; it retries nothing."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def async_client(self) -> AsyncOpenAI:
        """Return the asynchronous one; close it (`async with`)."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def router(self) -> Scrape:
        """Return the router's series."""
        return Scrape.of(self.http, self.url)

    def workers(self) -> dict[str, Scrape]:
        """Return every worker's series, by its id."""
        status = self.http.get(f"{self.url}/status").json()
        return {
            worker["id"]: Scrape.of(self.http, f"http://{worker['metrics_address']}")
            for worker in status["workers"]
        }

    def wait_until_idle(self) -> dict[str, Scrape]:
        """Wait until no worker holds a block for a request, and assert that none is lost.

        Returns:
            every worker's series, by its id.
        """
        clock = SystemClock()
        end = clock.now() + IDLE_WITHIN_S
        num_scrapes = 1
        workers = self.workers()
        while any(worker.blocks[state] for worker in workers.values() for state in IN_USE):
            is_late = clock.now() >= end and num_scrapes >= _IDLE_SCRAPES
            assert not is_late, f"in use after {IDLE_WITHIN_S:g} s: {_blocks(workers)}"
            num_scrapes += 1
            workers = self.workers()
        for worker in workers.values():
            blocks = worker.blocks
            assert sum(blocks[state] for state in BLOCK_STATES) == blocks["total"] > 0, blocks
        return workers

    def pid(self, component: str) -> int:
        """Return the process id that `component` ("prefill-0", "router", "etcd") had last."""
        lines = [line.split() for line in self.launched.out]
        pids = [int(line[3]) for line in lines if line[:3] == [component, "ready", "pid"]]
        return pids[-1]


def _blocks(workers: Mapping[str, Scrape]) -> dict[str, dict[str, int]]:
    return {name: worker.blocks for name, worker in workers.items()}


Up = Callable[..., Cluster]


@pytest.fixture(scope="module", autouse=True)
def not_measured() -> Iterator[None]:
    """Keep coverage.py out of the processes that a cluster starts: it would make models slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Start clusters: `up("--colocated", "1")`. Equal arguments within one module share one.

    At the module's end each is stopped with SIGTERM, and must end well and leave nothing.
    """
    program = str(Path(sys.executable).with_name("dovetail"))
    started: dict[tuple[str, ...], Cluster] = {}

    def starter(*arguments: str) -> Cluster:
        if arguments not in started:
            command = [program, "up", "--port", "0", *arguments]
            temporary = tmp_path_factory.mktemp("cluster")
            launched = stack.enter_context(Launched(command, temporary))
            started[arguments] = Cluster(launched)
        return started[arguments]

    with ExitStack() as stack:
        yield starter
        for cluster in started.values():
            cluster.close()
            if cluster.launched.process.poll() is None:
                code = cluster.launched.stop(signal.SIGTERM)
                assert code == 0, cluster.launched.transcript()
            cluster.launched.assert_nothing_left()
