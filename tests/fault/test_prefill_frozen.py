"""SIGSTOP of a prefill worker while it pushes, SIGCONT after the fence: late writes are lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.clock import SystemClock
from tests.asked import Asked, prompt_of
from tests.cluster import Cluster, Up
from tests.faults import deaths, process, scrape, statuses, until, wait_idle, wait_live

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SUSPECT_WITHIN_S = 3.0
"""suspect_s and one heartbeat_s, by design, and some time to look."""

FREEZE = "prefill-0"
POOL = (
    "--executor", "mock",
    "--set", f"engine.kv_memory={512 * 1024}",
    "--set", "engine.chunk_tokens=128",
    "--set", "engine.mock_prompt_token_s=0.0005",
    "--set", "kv_transfer.quarantine_s=1.5",
    "--set", "kv_transfer.try_s=300",  # only the missing heartbeats may end an attempt
)  # fmt: skip


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest, up: Up) -> Iterator[Cluster]:
    """Yield a cluster of one or two prefill workers; nobody may have died of a test."""
    workers = [*(f"prefill-{i}" for i in range(request.param)), "decode-0"]
    cluster = up("--prefill", str(request.param), *POOL)
    wait_live(cluster, *workers)
    yield cluster
    wait_live(cluster, *workers)
    wait_idle(cluster, *workers)
    assert deaths(cluster) == []


def ask_frozen_worker(cluster: Cluster) -> Asked:
    """Send prompts until one is under way at `FREEZE`, and freeze it after a few blocks."""
    for salt in range(20):
        start = scrape(cluster, FREEZE).total("dovetail:blocks_pushed_total")
        asked = Asked(cluster.url, prompt_of(3000, salt), 24)

        def pushed(before: float = start, asked: Asked = asked) -> bool:
            series = scrape(cluster, FREEZE)
            at_work = series.total("dovetail:blocks_pushed_total") >= before + 10
            return at_work or bool(asked.tokens)

        until(pushed, "blocks pushed, by any worker")
        if not asked.tokens:
            process(cluster, FREEZE).suspend()
            return asked
        asked.expect_mock_answer()
    pytest.fail(f"no prompt of 20 was sent to {FREEZE}")


def test_frozen_while_it_pushes(cluster: Cluster) -> None:
    clock = SystemClock()
    fences = scrape(cluster, "decode-0").total("dovetail:fences_total")
    asked = ask_frozen_worker(cluster)
    frozen_at = clock.now()
    frozen = process(cluster, FREEZE)
    try:
        until(lambda: statuses(cluster)[FREEZE]["state"] == "suspect", "suspect")
        assert clock.now() - frozen_at <= SUSPECT_WITHIN_S
        # A new request is not sent there, and is not held up.
        fresh = Asked(cluster.url, prompt_of(200, 30), 24)
        fresh.expect_mock_answer()
        assert fresh.path["prefill_worker"] != FREEZE
        asked.expect_mock_answer()
        assert asked.path["prefill_worker"] != FREEZE
        until(
            lambda: scrape(cluster, "decode-0").total("dovetail:fences_total") > fences, "the fence"
        )
        wait_idle(cluster, "decode-0")
        # What the frozen worker may still write is addressed to these requests' blocks.
        late = [Asked(cluster.url, prompt_of(1200, 40 + i), 200) for i in range(6)]
        late[0].wait_for_tokens(2)
    finally:
        frozen.resume()
    for one in late:
        one.expect_mock_answer()
    until(lambda: statuses(cluster)[FREEZE]["state"] == "live", "live again")
    wait_idle(cluster, FREEZE, "decode-0")
    ask = Asked(cluster.url, prompt_of(3000, 60), 24, disaggregate="always")
    ask.expect_mock_answer()
    assert ask.path["prefill_worker"] is not None
