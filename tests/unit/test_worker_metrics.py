"""What a worker serves over HTTP: its series, its health, and an error for anything else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from deploy.worker.metrics import WorkerMetrics
from deploy.worker.probes import WorkerApp
from tests.pool_cluster import pool_cluster, request_of, served

pytestmark = pytest.mark.anyio


class Served:
    """A worker's application, asked without a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_refreshed = 0
        self.app = WorkerApp(registry, refresh=self.refresh, obstacle=self.obstacle)

    async def refresh(self) -> None:
        self.num_refreshed += 1

    async def obstacle(self) -> str:
        return ""

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return the answer's status and body."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        nothing: Any = None  # the body is not read
        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        await self.app(scope, nothing, send)
        start, body = sent
        return start["status"], body["body"]


async def names(served: Served) -> set[str]:
    """Return the names of a scrape's families."""
    status, body = await served.get("/metrics")
    assert status == 200
    return {family.name for family in text_string_to_metric_families(body.decode())}


async def test_a_worker_shows_both_pools_and_the_engine_from_its_first_snapshot() -> None:
    async with pool_cluster() as cluster:
        request = request_of("r", range(10, 40))
        await served(cluster.router.start(request, cluster.candidates), request)
        record = cluster.decode_machine.record
        decode = WorkerMetrics(record, cluster.decode, cluster.prefills[0])
        at_decode = Served(decode.registry)
        stats = await cluster.until_idle()

        shown = await names(at_decode)
        assert {"dovetail:worker_requests", "dovetail:prefill_attempts"} <= shown
        assert "vllm:num_requests_running" not in shown
        assert at_decode.num_refreshed == 1

        decode.show_engine(stats)
        labels = {"model_name": "mock", "engine": record.worker_id}
        waiting = ("vllm:num_requests_waiting", labels)
        assert decode.registry.get_sample_value(*waiting) == 0
        decode.show_engine(msgspec.structs.replace(stats, num_waiting=3))
        assert decode.registry.get_sample_value(*waiting) == 3


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/health", 200, b"alive"),
        ("/health/live", 200, b"alive"),
        ("/health/ready", 200, b"ready"),
        ("/v1/models", 404, b"unknown route /v1/models: a worker serves /metrics and /health"),
    ],
)
async def test_routes(path: str, status: int, said: bytes) -> None:
    answer = await Served(CollectorRegistry()).get(path)
    assert answer[0] == status
    assert said in answer[1]
