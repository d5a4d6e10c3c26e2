"""kill -9 of the only decode worker: an answer or a typed error, never a hang; then all serves.

(Going on at another decode worker is another page's.)
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.asked import Asked, prompt_of
from tests.cluster import Cluster, Up
from tests.faults import deaths, kill, scrape, until, wait_idle, wait_live, wait_restarted

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORKERS = ("prefill-0", "decode-0")


@pytest.fixture
def cluster(up: Up) -> Iterator[Cluster]:
    """Yield a cluster; after a test both workers serve, and only decode-0 has died."""
    cluster = up(
        "--executor", "mock",
        "--set", "engine.chunk_tokens=128",
        "--set", "engine.mock_prompt_token_s=0.0005",
        "--set", "engine.mock_step_s=0.02",
    )  # fmt: skip
    wait_live(cluster, *WORKERS)
    yield cluster
    wait_live(cluster, *WORKERS)
    asked = Asked(cluster.url, prompt_of(200, 1000 + len(deaths(cluster))), 8)
    asked.expect_mock_answer()
    assert asked.path["prefill_worker"] == "prefill-0"
    wait_idle(cluster, *WORKERS)
    assert set(deaths(cluster)) == {"decode-0"}


def test_killed_at_idle(cluster: Cluster) -> None:
    dead = kill(cluster, "decode-0")
    Asked(cluster.url, prompt_of(200, 1), 8).expect_mock_answer_or_503()
    wait_restarted(cluster, "decode-0", dead)


def test_killed_in_mid_stream(cluster: Cluster) -> None:
    asked = [
        Asked(cluster.url, prompt_of(200 + i, 10 + i), 100, stream=i % 2 == 0) for i in range(6)
    ]
    asked[0].wait_for_tokens(10)
    dead = kill(cluster, "decode-0")
    for one in asked:
        one.expect_mock_answer_or_503()
    wait_restarted(cluster, "decode-0", dead)


def test_killed_while_it_receives(cluster: Cluster) -> None:
    """The prefill worker stops at once: nobody waits for that prompt."""
    asked = Asked(cluster.url, prompt_of(4000, 20), 8, disaggregate="always")

    def is_receiving() -> bool:
        states = scrape(cluster, "decode-0").by_label("dovetail:worker_requests", "state")
        return states["receiving"] == 1

    def num_let_go() -> float:
        outcomes = scrape(cluster, "prefill-0").by_label(
            "dovetail:prefill_handoffs_total", "outcome"
        )
        return outcomes["settled"]

    until(is_receiving, "a request receives")
    before = num_let_go()
    dead = kill(cluster, "decode-0")
    # Its blocks go with it; soon the worker's next life may ask for the same prompt.
    until(lambda: num_let_go() > before, "the prompt is let go of", timeout_s=2.0)
    asked.expect_mock_answer_or_503()
    wait_restarted(cluster, "decode-0", dead)
