"""deploy.worker.health and the route that shows it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from core.errors import FabricError
from deploy.worker.health import WorkerHealth
from deploy.worker.probes import WorkerApp
from kv_transfer.transport import Health

pytestmark = pytest.mark.anyio

WORKS = Health(ok=True, transport="ucx")
FAILS = Health(ok=False, transport="ucx", reason="no device")


class Probe:
    """Asks `/health/ready` of a worker whose fabric is as the test says."""

    def __init__(self) -> None:
        self.fabric: Health | FabricError = WORKS
        self.path_failure = ""
        self.health = WorkerHealth(self.ask_fabric, lambda: self.path_failure)
        self.app = WorkerApp(
            CollectorRegistry(), refresh=self.refresh, obstacle=self.health.obstacle
        )

    async def refresh(self) -> None:
        """No scrape here."""

    async def ask_fabric(self) -> Health:
        if isinstance(self.fabric, FabricError):
            raise self.fabric
        return self.fabric

    async def status(self) -> int:
        return (await self.ask())[0]

    async def ask(self) -> tuple[int, dict[str, str]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        nothing: Any = None  # the body is not read
        await self.app({"type": "http", "path": "/health/ready"}, nothing, send)
        return sent[0]["status"], msgspec.json.decode(sent[1]["body"])


async def test_a_worker_is_ready_from_its_registration_until_it_drains() -> None:
    probe = Probe()
    assert await probe.status() == 503
    probe.health.registered()
    assert await probe.status() == 200
    probe.health.draining(is_draining=True)
    assert await probe.status() == 503
    probe.health.registered()
    assert await probe.status() == 503, "its entry came back in etcd meanwhile"
    assert await probe.ask() == (503, {"status": "not ready", "reason": "draining"})


@pytest.mark.parametrize("fabric", [FAILS, FabricError("the fabric stopped")])
async def test_it_is_not_while_its_fabric_fails(fabric: Health | FabricError) -> None:
    probe = Probe()
    probe.health.registered()
    probe.fabric = fabric
    reason = str(fabric) if isinstance(fabric, FabricError) else fabric.reason
    assert await probe.ask() == (503, {"status": "not ready", "reason": reason})
    probe.fabric = WORKS
    assert await probe.status() == 200


async def test_it_is_not_while_no_path_to_a_peer_works() -> None:
    probe = Probe()
    probe.health.registered()
    probe.path_failure = "no KV moves: reset"
    assert await probe.ask() == (503, {"status": "not ready", "reason": "no KV moves: reset"})
    probe.path_failure = ""
    assert await probe.ask() == (200, {"status": "ready"})
