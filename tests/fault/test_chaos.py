"""Mixed requests whose clients leave, while processes are killed, stopped and frozen: of no answer
anything is lost, wrong or repeated, and nothing of any request is left.

Crowded: 200 at once on small pools, of which prefill workers are struck every second or two.
Steady: so many a second at two routers, and every fault of the table; `make chaos` has more of it.

`--chaos-seeds 1-100` runs others than the five. A seed fixes the requests, who leaves when, and who
is hit when, though not what the machine makes of it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from core.clock import SystemClock
from tests.asked import Asked, prompt_of
from tests.chaos_client import Answered, ask
from tests.chaos_cluster import CROWDED, STEADY, ChaosCluster
from tests.chaos_faults import ETCD, PREFILL_TABLE, TABLE, What
from tests.chaos_requests import Request
from tests.chaos_run import Plan, Report, drawn, run, warm_up
from tests.etcd_server import EtcdServer
from tests.figures import Figures

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REQUESTS = 200


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a seed with each."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds_of(metafunc.config))


def seeds_of(config: pytest.Config) -> range:
    """Return the seeds that the option names."""
    first, _, last = str(config.getoption("--chaos-seeds")).partition("-")
    return range(int(first), int(last or first) + 1)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """Yield one cluster for all seeds: each leaves it as it found it, or fails."""
    directory = tmp_path_factory.mktemp("crowded")
    with EtcdServer(directory) as etcd, ChaosCluster(directory, etcd, CROWDED) as cluster:
        warm_up(cluster, drawn(0, NUM_REQUESTS))
        yield cluster


def test_leaks_are_seen(crowded: ChaosCluster) -> None:
    """What still runs is to the judge what a leak would be; so is what somebody left open."""
    url = crowded.router("router-0").url
    asked = Asked(url, prompt_of(100, 1), 900)
    asked.wait_for_tokens(1)
    found = " ".join(crowded.leaks(0.0))
    kinds = ("owned", "dovetail:requests", "dovetail:http_requests", "dovetail:worker_requests")
    for kind in (*kinds, "dovetail:engine_sequences", "requests_of_this_router"):
        assert kind in found, found
    asked.leave()
    assert crowded.leaks() == []
    etcd = crowded.etcd
    lease = etcd.ctl("lease", "grant", "600").split()[1]
    etcd.ctl("put", "/dovetail/left", "behind", f"--lease={lease}")
    with ExitStack() as stack:
        for _ in range(20):  # more than may have been closed since it was counted
            address = ("127.0.0.1", crowded.ports["router-0"])
            stack.enter_context(socket.create_connection(address))
        kinds = tuple(one.partition(":")[0] for one in crowded.leaks(0.0))
    assert kinds == ("files of router-0", "etcd keys", "etcd leases")
    etcd.ctl("lease", "revoke", lease)
    assert crowded.leaks() == []


def expect_clean(report: Report, figures: Figures) -> None:
    """Assert that nothing was wrong, and that it had cause to be."""
    figures(report.line())
    assert report.is_clean, "\n".join(report.details())
    assert report.faults, "nobody was hit"
    assert report.num_left >= len(report.outcomes) // 20


def test_a_crowd_at_once(crowded: ChaosCluster, seed: int, figures: Figures) -> None:
    before = crowded.toil()
    plan = Plan(seed, every_s=(1.0, 2.0), table=PREFILL_TABLE)
    report = run(crowded, drawn(seed, NUM_REQUESTS), plan, SystemClock())
    toil = crowded.toil()
    toil.subtract(before)
    figures(", ".join(f"{count} {name}" for name, count in toil.items()))
    expect_clean(report, figures)


def test_the_crowd_was_not_spared(crowded: ChaosCluster, pytestconfig: pytest.Config) -> None:
    """What the seeds are for has happened: attempts lost, late writers fenced off, preemptions."""
    if len(seeds_of(pytestconfig)) < 5:
        pytest.skip("too few seeds to tell")
    toil = crowded.toil()
    assert all(toil.values()), toil


def test_steady_traffic_at_two_routers(
    tmp_path_factory: pytest.TempPathFactory, figures: Figures
) -> None:
    directory = tmp_path_factory.mktemp("steady")
    table = [entry for entry in TABLE if entry.what is not What.FREEZE_LONG]
    with EtcdServer(directory) as etcd, ChaosCluster(directory, etcd, STEADY) as cluster:
        warm_up(cluster, drawn(0, 50))
        plan = Plan(7, rate_hz=12.0, every_s=(1.0, 1.5), table=table)
        report = run(cluster, drawn(7, NUM_REQUESTS), plan, SystemClock())
        expect_clean(report, figures)
        assert any(ETCD in fault for fault in report.faults), report.faults
        assert any("router" in fault for fault in report.faults), report.faults
        assert any("decode" in fault for fault in report.faults), report.faults
        expect_both_routers_to_spread(cluster)


def expect_both_routers_to_spread(cluster: ChaosCluster) -> None:
    """Assert that what comes to both at one moment, in which no load report can tell the one of the
    other's, goes to all workers."""
    requests = [one for one in drawn(8, 60) if one.leaves is None and one.disaggregate != "never"]
    answers = asyncio.run(_ask_all(cluster, requests))
    for role, names in (
        ("decode_worker", cluster.shape.decodes),
        ("prefill_worker", cluster.shape.prefills),
    ):
        used = [answered.path[role] for answered in answers if answered.path.get(role)]
        for name in names:
            assert used.count(name) >= len(used) // 5, (role, used)


async def _ask_all(cluster: ChaosCluster, requests: list[Request]) -> list[Answered]:
    ports = [cluster.ports[name] for name in cluster.shape.routers]
    asked = (ask(ports[at % len(ports)], request) for at, request in enumerate(requests))
    return await asyncio.gather(*asked)
