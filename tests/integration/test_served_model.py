"""Which model a router serves where its workers' models differ."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from control_plane.registry import WorkerSeen
from core.errors import ProtocolMismatch
from core.worker_record import Role
from tests.dispatch_cluster import Cluster, read, running, settle
from tests.dispatch_workers import FakeWorker, MemoryNetwork

pytestmark = pytest.mark.anyio


class RefusingNetwork(MemoryNetwork):
    """Refuses the handshake of workers that do not listen."""

    async def connect(self, address: str, *args: Any, **kwargs: Any) -> Any:
        if not self.workers[address].is_listening:
            self.num_refused += 1
            self.news.happened()
            raise ProtocolMismatch(address)
        return await super().connect(address, *args, **kwargs)


async def add(cluster: Cluster, name: str, *, listens: bool = True, **record: Any) -> FakeWorker:
    """Register a worker whose record says something else."""
    worker = await cluster.network.add(name, Role.DECODE)
    worker.is_listening = listens
    changed = msgspec.structs.replace(worker.record(), **record)
    refused = cluster.network.num_refused
    cluster.dispatcher.on_worker_change(WorkerSeen(changed))
    await cluster.until(
        lambda: worker.stream is not None if listens else cluster.network.num_refused > refused
    )
    await settle()
    return worker


def served(cluster: Cluster) -> tuple[int, int] | None:
    model = cluster.dispatcher.served_model()
    return None if model is None else (model.block_size, model.max_model_len)


async def test_a_refused_worker_says_nothing_of_the_model() -> None:
    async with running(RefusingNetwork()) as cluster:
        await add(cluster, "foreign", listens=False, max_model_len=8192)
        assert served(cluster) is None
        worker = await add(cluster, "d0")
        assert served(cluster) == (16, 4096)
        worker.is_listening = False
        cluster.network.router_ends["d0"].close("lost")
        await cluster.until(lambda: worker.stream is None)
        await settle()
        assert served(cluster) == (16, 4096), "of the worker that was open before"


async def test_a_live_worker_keeps_the_model(caplog: pytest.LogCaptureFixture) -> None:
    async with running(RefusingNetwork()) as cluster:
        worker = await add(cluster, "d0")
        await add(cluster, "d1", block_size=32)
        await add(cluster, "d2", block_size=32, model="other")
        await add(cluster, "d3", block_size=32)
        assert served(cluster) == (16, 4096), "most have another block size"
        cluster.network.router_ends["d3"].close("lost")
        await cluster.until(lambda: "d3" not in _live(cluster))
        await cluster.until(lambda: "d3" in _live(cluster))
        told = [r.getMessage() for r in caplog.records if "gets no requests" in r.message]
        assert told == [
            "d1 gets no requests: it has block_size 32 (served: 16)",
            "d2 gets no requests: it has model 'other' (served: 'model'), "
            "block_size 32 (served: 16)",
            "d3 gets no requests: it has block_size 32 (served: 16)",
        ]
        assert refused_for(cluster, "block_size") == 2, "once a worker"
        assert refused_for(cluster, "model") == 1
        worker.is_listening = False
        cluster.network.router_ends["d0"].close("lost")
        await cluster.until(lambda: "d0" not in _live(cluster))
        assert served(cluster) == (32, 4096), "none of the old model lives"


async def test_a_prefill_worker_of_another_layout_is_told_of_and_never_paired(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(RefusingNetwork()) as cluster:
        decode = await add(cluster, "d0", layout="version=1 block_size=16")
        foreign = await cluster.network.add("p0", Role.PREFILL)
        record = msgspec.structs.replace(foreign.record(), layout="version=1 block_size=32")
        cluster.dispatcher.on_worker_change(WorkerSeen(record))
        await cluster.until(lambda: "p0" in _live(cluster))
        told = [r.getMessage() for r in caplog.records if "not paired" in r.message]
        assert told == ["p0 is not paired: layout.block_size 32 (decode has: 16)"]
        assert refused_for(cluster, "layout.block_size") == 1
        stream = cluster.start("r", max_tokens=1)
        await cluster.until(lambda: bool(decode.jobs))
        assert decode.started[0].candidates == ()
        decode.step()
        await read(stream)


def refused_for(cluster: Cluster, reason: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(cluster.refused)
    return registry.get_sample_value("dovetail:peers_refused_total", {"reason": reason})


def _live(cluster: Cluster) -> set[str]:
    return {one["id"] for one in cluster.status() if one["state"] == "live"}
