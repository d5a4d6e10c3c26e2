"""`dovetail up --routers 2`: one is killed, and breaks its own connections only."""

from __future__ import annotations

import pytest

from tests.asked import Asked, mock_answer, prompt_of
from tests.cluster import Up
from tests.faults import deaths, kill, until, wait_idle, wait_live

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORKERS = ("prefill-0", "decode-0")
NUM_TOKENS = 200


def test_a_killed_router_takes_its_own_connections_only(up: Up) -> None:
    cluster = up("--routers", "2", "--executor", "mock", "--set", "engine.mock_step_s=0.02")
    other = cluster.launched.wait_for(r"^also at +(\S+)/v1$")[1]
    wait_live(cluster, *WORKERS)
    staying = [Asked(cluster.url, prompt_of(200, i), NUM_TOKENS) for i in range(4)]
    broken = [Asked(other, prompt_of(200, 10 + i), NUM_TOKENS) for i in range(4)]
    for one in (*staying, *broken):
        one.wait_for_tokens(2)
    dead = kill(cluster, "router-1")
    for one in broken:
        assert one.end().failure, one.report()
        assert one.tokens == mock_answer(one.prompt, NUM_TOKENS)[: len(one.tokens)]
    for one in staying:
        one.expect_mock_answer()
    # The workers saw its streams end, and freed what was its.
    wait_idle(cluster, *WORKERS)
    cluster.launched.wait_until(lambda: cluster.pid("router-1") != dead, 60)
    ready = f"{other}/health/ready"
    until(lambda: cluster.http.get(ready).is_success, "it serves again, at the same address")
    Asked(other, prompt_of(200, 20), 8).expect_mock_answer()
    assert deaths(cluster) == ["router-1"]
