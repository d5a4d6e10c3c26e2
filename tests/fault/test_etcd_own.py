"""An etcd of the user's own under traffic at two routers: started again, with its data and empty,
out of space, its leases revoked. No request fails, no process ends, and all register again.

Also whose SIGSTOP is seen by whom. (Frozen for 3, 15 and 60 s, beside all else: `make chaos`.)
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from core.clock import SystemClock
from tests.chaos_cluster import STEADY, ChaosCluster
from tests.chaos_load import Load
from tests.chaos_requests import Drawing, Request
from tests.chaos_run import drawn, warm_up
from tests.etcd_server import EtcdServer
from tests.faults import statuses, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SEEN_WITHIN_S = 3.0
"""suspect_s and heartbeat_s, by design, and some time to look."""

TRIES = 3
"""Of which one must be in time: the machine may be busy."""

QUOTA_BYTES = 4 << 20
RATE_HZ = 15.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """Yield one cluster for all tests."""
    directory = tmp_path_factory.mktemp("own etcd")
    flags = {"quota-backend-bytes": str(QUOTA_BYTES)}
    with (
        EtcdServer(directory, flags=flags) as etcd,
        ChaosCluster(directory, etcd, STEADY) as cluster,
    ):
        warm_up(cluster, drawn(0, 30))
        yield cluster


@pytest.fixture
def cluster(shared: ChaosCluster) -> Iterator[ChaosCluster]:
    """Yield it; whatever a test did, nobody may have died of it, and nothing be left."""
    yield shared
    shared.wait_live()
    assert len(records(shared)) == len(shared.workers)
    assert shared.leaks() == []
    assert shared.complaints() == []


def records(cluster: ChaosCluster) -> dict[str, int]:
    """Return the registered workers, and their registrations."""
    lines = cluster.etcd.ctl("get", "--prefix", "/dovetail/default/workers/", "--print-value-only")
    found = [json.loads(line) for line in lines.splitlines() if line]
    return {one["worker_id"]: one["registration"] for one in found}


def under_traffic(cluster: ChaosCluster, seed: int, act: Callable[[], object]) -> None:
    """Act while requests come to both routers; each must be answered right."""
    drawing = Drawing(seed)
    load = Load(cluster, [], lambda: cluster.shape.routers, SystemClock())

    async def send() -> None:
        acting = asyncio.create_task(asyncio.to_thread(act))
        while not acting.done():
            await load.send([_staying(drawing.draw()) for _ in range(15)], RATE_HZ)
        await acting

    asyncio.run(send())
    assert [fault for outcome in load.outcomes for fault in outcome.faults()] == []
    assert load.outcomes


def _staying(request: Request) -> Request:
    return replace(request, leaves=None)


def registered_again(cluster: ChaosCluster, before: dict[str, int]) -> bool:
    now = records(cluster)
    return now.keys() == before.keys() and all(now[name] > before[name] for name in before)


@pytest.mark.parametrize("empty", [False, True])
def test_started_again(cluster: ChaosCluster, empty: bool) -> None:
    before = records(cluster)

    def act() -> None:
        cluster.etcd.restart(empty=empty)
        if empty:
            until(lambda: registered_again(cluster, before), "all are registered again")

    under_traffic(cluster, 20 + empty, act)


def test_leases_revoked_by_hand(cluster: ChaosCluster) -> None:
    before = records(cluster)

    def act() -> None:
        _, *leases = cluster.etcd.ctl("lease", "list").splitlines()
        assert len(leases) >= len(cluster.workers)
        for lease in leases:
            cluster.etcd.ctl("lease", "revoke", lease)
        until(lambda: registered_again(cluster, before), "all are registered again")

    under_traffic(cluster, 30, act)


def test_without_space(cluster: ChaosCluster) -> None:
    """Whoever starts meanwhile registers once there is space again; nobody needs him until then."""
    etcd = cluster.etcd

    def act() -> None:
        etcd.fill()
        try:
            cluster.kill("prefill-1")
            cluster.start("prefill-1")
            waits = "compact, defragment and disarm its alarm"
            until(lambda: any(waits in line for line in cluster.log("prefill-1")), "it says so")
            known = statuses(cluster.router("router-0")).get("prefill-1", {"state": "gone"})
            assert known["state"] != "live", known  # its last life's entry may still be there
        finally:
            etcd.make_space()
        cluster.wait_ready("prefill-1")

    pids = {name: cluster.pid(name) for name in cluster.workers if name != "prefill-1"}
    under_traffic(cluster, 40, act)
    assert pids == {name: cluster.pid(name) for name in pids}


def test_everyone_s_sigstop_is_seen(cluster: ChaosCluster) -> None:
    """A worker's by the routers, a router's by the workers. (Pools: `test_prefill_frozen.py`.)"""
    late: list[str] = []
    for _ in range(TRIES):
        late = _seen_late(cluster)
        cluster.wait_live()
        if not late:
            return
    pytest.fail(f"not within {SEEN_WITHIN_S:g} s: {late}")


def _seen_late(cluster: ChaosCluster) -> list[str]:
    frozen = ("prefill-0", "decode-0", "router-0")
    marks = {name: len(cluster.log(name)) for name in ("decode-1", "prefill-1")}
    clock = SystemClock()
    began = clock.now()
    for name in frozen:
        cluster.freeze(name)
    unseen: dict[str, Callable[[], bool]] = {
        f"{name} by router-1": functools.partial(_is_suspect, cluster, name)
        for name in ("prefill-0", "decode-0")
    }
    for by, mark in marks.items():
        look = functools.partial(_has_missed, cluster, by, mark, "router-0")
        unseen[f"router-0 by {by}"] = look
    late: list[str] = []
    try:
        while unseen:
            seen = [name for name, look in unseen.items() if look()]
            took_s = clock.now() - began
            late += [f"{name} after {took_s:.1f} s" for name in seen if took_s > SEEN_WITHIN_S]
            unseen = {name: look for name, look in unseen.items() if name not in seen}
            assert took_s < 60, list(unseen)
            time.sleep(0.02)
    finally:
        for name in frozen:
            cluster.thaw(name)
    return late


def _is_suspect(cluster: ChaosCluster, worker: str) -> bool:
    """Or forgotten already: its lease has ended, too."""
    known = statuses(cluster.router("router-1"))
    return worker not in known or known[worker]["state"] == "suspect"


def _has_missed(cluster: ChaosCluster, by: str, mark: int, peer: str) -> bool:
    return any(f"heartbeats of {peer} are missing" in line for line in cluster.log(by)[mark:])
