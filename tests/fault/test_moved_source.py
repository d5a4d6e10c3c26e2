"""A request was moved, and the worker that has its prompt's KV is killed before the next one has
it: the KV is computed again, and the client sees nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.asked import Asked, prompt_of
from tests.chaos_cluster import STEADY, ChaosCluster
from tests.chaos_run import drawn, warm_up
from tests.etcd_server import EtcdServer
from tests.faults import scrape, statuses, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHAPE = STEADY._replace(
    prefills=(),
    routers=STEADY.routers[:1],
    settings=(
        *STEADY.settings,
        # Who is frozen here is not suspected, so that the router sends to it; and is waited for.
        *("--set", "control_plane.suspect_s=60", "--set", "kv_transfer.try_s=60"),
    ),
)
ROUTER = SHAPE.routers[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    directory = tmp_path_factory.mktemp("moved")
    with EtcdServer(directory) as etcd, ChaosCluster(directory, etcd, SHAPE) as started:
        warm_up(started, [one for one in drawn(0, 20) if one.disaggregate != "always"])
        yield started


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_source_killed_after_its_last_word(cluster: ChaosCluster, *, is_asked: bool) -> None:
    """The next worker stands still when the source says its last word, and goes on once the source
    is dead; or, where `is_asked`, asks one that stands still and then dies."""
    num_before = num_sent_on(cluster)
    asked = Asked(cluster.router(ROUTER).url, prompt_of(150, 7 + is_asked), 120)
    asked.wait_for_tokens(3)
    source, following = sides(cluster)
    cluster.freeze(following)
    cluster.order(ROUTER, "drain", {"worker": source})
    until(lambda: num_sent_on(cluster) > num_before, "it is sent on")
    if is_asked:
        cluster.freeze(source)
        cluster.thaw(following)
        until(lambda: num_receiving(cluster, following), "the source is asked")
    cluster.kill(source)
    cluster.thaw(following)
    asked.expect_mock_answer()
    assert asked.path["decode_worker"] == following
    assert asked.path["decision"] == "fallback"
    cluster.start(source)
    cluster.wait_live()
    assert cluster.leaks() == []


def sides(cluster: ChaosCluster) -> tuple[str, str]:
    """Return who has the only request, and the other one."""
    known = statuses(cluster.router(ROUTER))
    counts = {name: known[name]["requests_of_this_router"] for name in SHAPE.decodes}
    following, source = sorted(counts, key=lambda name: counts[name])
    assert (counts[following], counts[source]) == (0, 1)
    return source, following


def num_sent_on(cluster: ChaosCluster) -> int:
    """Return how many requests were sent to both decode workers so far."""
    return sum(workers >= {*SHAPE.decodes} for workers in cluster.dispatches().values())


def num_receiving(cluster: ChaosCluster, worker: str) -> float:
    """Return how many requests wait for their KV at a worker."""
    series = scrape(cluster.router(ROUTER), worker)
    return series.total("dovetail:worker_requests", state="receiving")
