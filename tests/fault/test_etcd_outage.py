"""etcd is killed, and is frozen beyond every lease: no request fails, and all register again."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from core.clock import SystemClock
from tests.asked import Asked, prompt_of
from tests.cluster import Cluster, Up
from tests.faults import deaths, kill, process, statuses, until, wait_idle, wait_live

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LEASE_S = 2
FROZEN_S = 5.0
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.fixture
def cluster(up: Up) -> Iterator[Cluster]:
    """Yield a cluster of two and two workers, which outlive everything here."""
    cluster = up(
        "--prefill", "2", "--decode", "2",
        "--executor", "mock",
        "--set", f"control_plane.lease_s={LEASE_S}",
    )  # fmt: skip
    wait_live(cluster, *WORKERS)
    pids = {name: cluster.pid(name) for name in WORKERS}
    yield cluster
    wait_live(cluster, *WORKERS)
    wait_idle(cluster, *WORKERS)
    assert pids == {name: cluster.pid(name) for name in WORKERS}
    expect_every_worker_used(cluster)


@contextmanager
def traffic(cluster: Cluster, salt: int) -> Generator[list[Asked]]:
    """Send one request after the other, each checked, until the block ends."""
    answered: list[Asked] = []
    failures: list[BaseException] = []
    is_over = threading.Event()

    def client(number: int) -> None:
        at = 0
        while not is_over.is_set() and not failures:
            try:
                prompt = prompt_of(100, salt + 10_000 * number + at)
                asked = Asked(cluster.url, prompt, 20, stream=at % 2 == 0)
                asked.expect_mock_answer()
            except BaseException as error:
                failures.append(error)
                raise
            answered.append(asked)
            at += 1
            is_over.wait(0.05)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for one in clients:
        one.start()
    try:
        yield answered
    finally:
        is_over.set()
        for one in clients:
            one.join()
    assert not failures, failures


def expect_every_worker_used(cluster: Cluster) -> None:
    """Assert that a burst is spread over all workers."""
    salt = 100_000 + 100 * len(deaths(cluster))
    asked = [Asked(cluster.url, prompt_of(400, salt + i), 20) for i in range(24)]
    for one in asked:
        one.expect_mock_answer()
    used = {one.path[role] for one in asked for role in ("prefill_worker", "decode_worker")}
    assert used - {None} == set(WORKERS)


def test_killed_during_traffic(cluster: Cluster) -> None:
    with traffic(cluster, 1000) as answered:
        dead = kill(cluster, "etcd")
        cluster.launched.wait_until(lambda: cluster.pid("etcd") != dead, 60)
        assert cluster.pid("etcd") != dead, cluster.launched.transcript()
        served = len(answered)
        until(lambda: len(answered) > served + 10, "traffic goes on")
    assert deaths(cluster) == ["etcd"]


def test_frozen_beyond_every_lease(cluster: Cluster) -> None:
    """On thaw etcd deletes every worker's key, although all of them live (measured)."""
    clock = SystemClock()
    etcd = process(cluster, "etcd")
    with traffic(cluster, 2000) as answered:
        etcd.suspend()
        try:
            frozen_at, served = clock.now(), len(answered)
            until(lambda: clock.now() - frozen_at > FROZEN_S, "frozen long enough", poll_s=0.2)
            until(lambda: len(answered) > served + 10, "traffic went on")
            seen = statuses(cluster).values()
            assert {one["state"] for one in seen} == {"live"}
            ready = [f"http://{one['metrics_address']}/health/ready" for one in seen]
            assert {cluster.http.get(url).status_code for url in ready} == {200}
        finally:
            etcd.resume()
        # Keys vanish and come back; the streams that live are kept meanwhile.
        served = len(answered)
        until(lambda: len(answered) > served + 20, "traffic goes on")
        wait_live(cluster, *WORKERS)
