"""The real model's KV in flight, 11 MB a step: the prefill worker is killed, and is frozen.

Each prompt comes under several cache salts: to the caches they are different prompts, so each is
computed and moved afresh, and the answers must be equal.
"""

from __future__ import annotations

import pytest

from tests.asked import Asked
from tests.cluster import Cluster, Up
from tests.faults import (
    deaths,
    kill,
    process,
    scrape,
    statuses,
    until,
    wait_idle,
    wait_live,
    wait_restarted,
)
from tests.prompts import story

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TOKENS, NUM_SHORT = 1600, 1000
BLOCK_BYTES = 720 * 1024  # in float32
NUM_BLOCKS = 215  # two such prompts and a bit: blocks that were quarantined are soon used again
WORKERS = ("prefill-0", "decode-0")


@pytest.fixture(scope="module")
def cluster(up: Up) -> Cluster:
    """Return a cluster of float32, whose answers do not depend on who computes."""
    cluster = up(
        "--set", "engine.weights=f32", "--set", "engine.kv_dtype=f32",
        "--set", f"engine.kv_memory={NUM_BLOCKS * BLOCK_BYTES}",
        "--set", "engine.chunk_tokens=256",
        "--set", "kv_transfer.quarantine_s=2",
        "--set", "kv_transfer.try_s=60",  # on a busy machine a step may take 10 s
    )  # fmt: skip
    wait_live(cluster, *WORKERS)
    return cluster


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> dict[int, list[int]]:
    """Return the undisturbed answers, by the prompt's length."""
    tokens: dict[int, list[int]] = {}
    for length in (NUM_SHORT, NUM_TOKENS):
        asked = ask(cluster, "undisturbed", length)
        tokens[length] = asked.whole()
        assert asked.path["prefill_worker"] == "prefill-0", asked.path
    return tokens


def ask(cluster: Cluster, salt: str, length: int) -> Asked:
    return Asked(cluster.url, story(length, length), 8, cache_salt=salt)


def pushing(cluster: Cluster, salt: str, length: int) -> Asked:
    """Return a request of which the first blocks have been pushed, and most have not."""
    pushed = "dovetail:blocks_pushed_total"
    before = scrape(cluster, "prefill-0").total(pushed)
    asked = ask(cluster, salt, length)
    until(lambda: scrape(cluster, "prefill-0").total(pushed) > before, "blocks pushed")
    return asked


def test_killed_while_it_pushes(cluster: Cluster, reference: dict[int, list[int]]) -> None:
    asked = pushing(cluster, "killed", NUM_TOKENS)
    dead = kill(cluster, "prefill-0")
    until(lambda: scrape(cluster, "decode-0").blocks["quarantined"], "quarantined blocks")
    assert asked.whole() == reference[NUM_TOKENS]
    assert asked.path["decision"] == "fallback"
    wait_idle(cluster, "decode-0")
    assert scrape(cluster, "decode-0").total("dovetail:fences_total") == 1
    wait_restarted(cluster, "prefill-0", dead)
    after = ask(cluster, "after the kill", NUM_TOKENS)
    assert after.whole() == reference[NUM_TOKENS]
    assert after.path["prefill_worker"] == "prefill-0"
    wait_idle(cluster, *WORKERS)


def test_frozen_while_it_pushes(cluster: Cluster, reference: dict[int, list[int]]) -> None:
    """Thawed, it pushes the step that it was computing, before or after it hears of the settle."""
    asked = pushing(cluster, "frozen", NUM_SHORT)
    fences = scrape(cluster, "decode-0").total("dovetail:fences_total")
    frozen = process(cluster, "prefill-0")
    frozen.suspend()
    try:
        until(lambda: statuses(cluster)["prefill-0"]["state"] == "suspect", "suspect")
        assert asked.whole() == reference[NUM_SHORT]
        until(lambda: scrape(cluster, "decode-0").total("dovetail:fences_total") > fences, "fence")
        wait_idle(cluster, "decode-0")
        late = ask(cluster, "late", NUM_SHORT)
        until(lambda: scrape(cluster, "decode-0").blocks["owned"], "the blocks are in use again")
    finally:
        frozen.resume()
    assert late.whole() == reference[NUM_SHORT]
    wait_live(cluster, *WORKERS)
    wait_idle(cluster, *WORKERS)
    assert ask(cluster, "after the thaw", NUM_SHORT).whole() == reference[NUM_SHORT]
    wait_idle(cluster, *WORKERS)
    assert deaths(cluster) == ["prefill-0"], "killed by the test before"
