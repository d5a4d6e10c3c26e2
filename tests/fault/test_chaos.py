"""200 mixed requests at once, whose clients leave, while prefill workers are killed and frozen: of
no answer anything is lost, wrong or repeated, and nothing of any request is left.

`--chaos-seeds 1-100` runs others than the ten. A seed fixes the requests, who leaves when, and who
is hit when, though not what the machine makes of it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from core.clock import SystemClock
from tests.chaos_client import Answered, ask
from tests.chaos_cluster import ChaosCluster
from tests.chaos_faults import Strikes
from tests.chaos_judge import Fault, Kind, judge
from tests.chaos_requests import Drawing, Request
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
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """Yield one cluster for all seeds: each leaves it as it found it, or fails."""
    directory = tmp_path_factory.mktemp("chaos")
    with EtcdServer(directory) as etcd, ChaosCluster(directory, etcd) as cluster:
        # Everyone is connected with everyone from here on: what was opened for that stays open.
        asyncio.run(answers_of(cluster, drawn(0)))
        assert cluster.leaks() == []
        cluster.begin()
        yield cluster


def drawn(seed: int) -> list[Request]:
    """Return a seed's requests, and work out now what they must be answered: there is no processor
    to spare while they run."""
    drawing = Drawing(seed)
    requests = [drawing.draw() for _ in range(NUM_REQUESTS)]
    assert all(request.expected for request in requests)
    return requests


async def answers_of(cluster: ChaosCluster, requests: Sequence[Request]) -> list[Answered]:
    """Send all at once."""
    return await asyncio.gather(*(ask(cluster.port, request) for request in requests))


async def answers_under(
    strikes: Strikes, cluster: ChaosCluster, requests: Sequence[Request]
) -> list[Answered]:
    """Send all at once, under strikes until the last is answered; return once all workers run."""
    are_over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(strikes.run(are_over))
        try:
            return await answers_of(cluster, requests)
        finally:
            are_over.set()


def test_no_seed_finds_a_fault(cluster: ChaosCluster, seed: int, figures: Figures) -> None:
    clock = SystemClock()
    requests = drawn(seed)
    started, before = clock.now(), cluster.toil()
    strikes = Strikes(cluster, random.Random(f"strikes of {seed}"))
    answers = asyncio.run(answers_under(strikes, cluster, requests))
    faults: list[tuple[int, Fault]] = []
    for number, (request, answered) in enumerate(zip(requests, answers, strict=True)):
        faults += [(number, fault) for fault in judge(request, answered)[:1]]
    cluster.wait_live()
    leaks = cluster.leaks()
    counts = Counter(fault.kind for _, fault in faults)
    num_left = sum(one.has_left for one in answers)
    found = ", ".join(f"{counts[kind]} {kind}" for kind in Kind)
    toil = cluster.toil()
    toil.subtract(before)
    hits = ", ".join(f"{count} {name}" for name, count in (strikes.counts + toil).items())
    figures(
        f"chaos, seed {seed}: {len(answers)} requests, {found}, {len(leaks)} leaked; "
        f"{hits}, {num_left} left, {clock.now() - started:.1f} s"
    )
    assert not faults, faults
    assert not leaks, leaks
    assert cluster.complaints() == []
    assert strikes.counts, "nobody was hit"
    assert num_left >= NUM_REQUESTS // 20


def test_the_cluster_was_not_spared(cluster: ChaosCluster, pytestconfig: pytest.Config) -> None:
    """What the seeds are for has happened: attempts lost, late writers fenced off, preemptions."""
    if len(seeds_of(pytestconfig)) < 10:
        pytest.skip("too few seeds to tell")
    toil = cluster.toil()
    assert all(toil.values()), toil
