"""A client leaves, in every state of its request: within 2 s no worker holds a block for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.asked import Asked, prompt_of
from tests.cluster import IDLE_WITHIN_S, Cluster, Up
from tests.faults import deaths, scrape, until, wait_idle

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORKERS = ("prefill-0", "decode-0")


@pytest.fixture
def cluster(up: Up) -> Iterator[Cluster]:
    """Yield a slow cluster whose pool holds less than three long prompts."""
    cluster = up(
        "--executor", "mock",
        "--set", f"engine.kv_memory={512 * 1024}",
        "--set", "engine.chunk_tokens=128",
        "--set", "engine.mock_prompt_token_s=0.0005",
        "--set", "engine.mock_step_s=0.01",
    )  # fmt: skip
    yield cluster
    assert deaths(cluster) == []
    Asked(cluster.url, prompt_of(200, 999), 8).expect_mock_answer()


def in_state(cluster: Cluster, state: str, count: int = 1) -> Callable[[], bool]:
    """Return whether so many requests are in a state at the decode worker."""

    def look() -> bool:
        series = scrape(cluster, "decode-0")
        return series.total("dovetail:worker_requests", state=state) == count

    return look


def leave_and_expect_idle(cluster: Cluster, *asked: Asked) -> None:
    for one in asked:
        one.leave()
    wait_idle(cluster, *WORKERS, timeout_s=IDLE_WITHIN_S)
    # What is forgotten at the workers is forgotten at the router too.
    until(
        lambda: not sum(cluster.router().by_label("dovetail:requests", "state").values()),
        "no request at the router",
        timeout_s=IDLE_WITHIN_S,
    )
    assert not in_state(cluster, "receiving")()


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_in_the_queue(cluster: Cluster, stream: bool) -> None:
    first = Asked(cluster.url, prompt_of(6000, 1 + stream), 8, stream=stream, disaggregate="always")
    until(in_state(cluster, "receiving"), "the first receives")
    second = Asked(
        cluster.url, prompt_of(3000, 3 + stream), 8, stream=stream, disaggregate="always"
    )
    until(in_state(cluster, "waiting"), "the second waits")
    second.leave()
    until(in_state(cluster, "waiting", 0), "nobody waits", timeout_s=IDLE_WITHIN_S)
    assert in_state(cluster, "receiving")(), "the other goes on"
    assert not first.tokens, "nobody waits because the other is through"
    first.expect_mock_answer()
    wait_idle(cluster, *WORKERS, timeout_s=IDLE_WITHIN_S)


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_while_the_prompt_is_computed(cluster: Cluster, stream: bool) -> None:
    """Some blocks have arrived, others are still to be pushed."""
    pushed = scrape(cluster, "prefill-0").total("dovetail:blocks_pushed_total")
    asked = Asked(
        cluster.url, prompt_of(4000, 10 + stream), 8, stream=stream, disaggregate="always"
    )
    until(
        lambda: scrape(cluster, "prefill-0").total("dovetail:blocks_pushed_total") > pushed,
        "blocks pushed",
    )
    leave_and_expect_idle(cluster, asked)
    stages = scrape(cluster, "prefill-0").by_label("dovetail:prefill_attempts", "stage")
    assert not any(stages.values()), stages


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_while_tokens_come(cluster: Cluster, stream: bool) -> None:
    asked = Asked(cluster.url, prompt_of(300, 20 + stream), 1000, stream=stream)
    until(in_state(cluster, "running"), "it runs")
    leave_and_expect_idle(cluster, asked)


def test_all_at_once(cluster: Cluster) -> None:
    """A crowd in every state at once, on one and the same tick."""
    asked = [Asked(cluster.url, prompt_of(200 + 60 * i, 30 + i), 500) for i in range(16)]
    asked[0].wait_for_tokens(5)
    leave_and_expect_idle(cluster, *asked)
