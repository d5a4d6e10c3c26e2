"""Who is short of memory: records, the listener that counts them, and what a router makes of it."""

from __future__ import annotations

import msgspec
import pytest

from control_plane.etcd.values import Deleted, KeyValue, Listing
from control_plane.preemptions import Preemption, PreemptionsListener
from control_plane.registry import WorkerSeen
from core.ids import Boot, WorkerId
from core.worker_record import Role
from router.dispatch.recent_preemptions import HALF_LIFE_S, RecentPreemptions
from router.dispatch.worker_table import WorkerTable
from router.policy.views import WorkerView
from tests.dispatch_cluster import Cluster, running
from tests.dispatch_workers import FINGERPRINT, MemoryNetwork

W0, W1 = WorkerId("w0"), WorkerId("w1")
BOOT, NEXT_BOOT = Boot("b0"), Boot("b1")


def entry(request: str, worker_id: WorkerId = W0, boot: Boot = BOOT) -> KeyValue:
    value = msgspec.json.encode(Preemption(worker_id, boot, "recompute"))
    return KeyValue(f"/preempted/{request}", value, mod_revision=1)


class Told:
    """A `PreemptionsListener` and what it told since."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.listener = PreemptionsListener(lambda *call: self.calls.append(call))

    def take(self) -> list[tuple[str, str, int]]:
        calls = [*self.calls]
        self.calls.clear()
        return calls


def test_records_are_counted_by_the_worker_s_life() -> None:
    told = Told()
    listing = Listing(7, (entry("a"), entry("b"), entry("c", W1)))
    assert told.listener.on_listing(listing, replay_from=1) == 8
    assert told.take() == [("w0", "b0", 2), ("w1", "b0", 1)]
    told.listener.on_changes([entry("d"), Deleted("/preempted/c", 2), Deleted("/preempted/x", 3)])
    assert told.take() == [("w0", "b0", 3), ("w1", "b0", 0)]
    told.listener.on_changes([entry("d", boot=NEXT_BOOT)])
    assert told.take() == [("w0", "b0", 2), ("w0", "b1", 1)]
    told.listener.on_listing(Listing(9, (entry("a"), entry("b"))), replay_from=1)
    assert told.take() == [("w0", "b1", 0)]


def test_what_is_no_record_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.listener.on_changes([KeyValue("/preempted/a", b"{}", mod_revision=1)])
    assert told.take() == []
    assert "/preempted/a is not a preemption's record" in caplog.text


def test_records_are_a_floor_that_fades() -> None:
    recent = RecentPreemptions()
    recent.recorded(4, 100.0)
    recent.told(17, 100.0)  # what was before the first load is not recent, but for what is recorded
    assert recent.count == 4
    recent.told(18, 100.0 + HALF_LIFE_S)
    assert recent.count == 3
    recent.recorded(2, 100.0 + HALF_LIFE_S)
    assert recent.count == 3, "those that are recorded were told as well"


def views(cluster: Cluster) -> list[WorkerView]:
    table: WorkerTable = cluster.dispatcher._workers
    return table.views(("model", FINGERPRINT, 16))


@pytest.mark.anyio
async def test_a_router_that_came_later_avoids_a_worker_short_of_memory() -> None:
    async with running(MemoryNetwork()) as cluster:
        worker = await cluster.network.add("d0", Role.DECODE)
        cluster.dispatcher.on_preempted(worker.name, Boot("before"), 9)
        cluster.dispatcher.on_preempted(worker.name, worker.boot, 3)  # before it is known at all
        cluster.dispatcher.on_worker_change(WorkerSeen(worker.record()))
        await cluster.until(lambda: bool(views(cluster)))
        assert 0 < views(cluster)[0].recent_preemptions <= 3
        cluster.dispatcher.on_preempted(worker.name, worker.boot, 6)
        assert views(cluster)[0].recent_preemptions == 6
        cluster.dispatcher.on_preempted(worker.name, Boot("before"), 0)
        cluster.dispatcher.on_preempted(worker.name, worker.boot, 0)
        assert 0 < views(cluster)[0].recent_preemptions <= 6, "it fades, as those on streams do"
        assert cluster.dispatcher._workers._preempted == {}
