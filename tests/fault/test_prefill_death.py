"""kill -9 of a prefill worker while it pushes: a later first token, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.asked import Asked, prompt_of
from tests.cluster import Cluster, Up
from tests.faults import (
    deaths,
    is_mapped,
    kill,
    pool_address,
    process,
    scrape,
    until,
    wait_idle,
    wait_live,
    wait_restarted,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TOKENS = 3000
"""Of a prompt: 188 blocks, pushed in 24 chunks over 1.5 s."""

NUM_BLOCKS = 512
POOL = (
    "--executor", "mock",
    "--set", f"engine.kv_memory={NUM_BLOCKS * 1024}",
    "--set", "engine.chunk_tokens=128",
    "--set", "engine.mock_prompt_token_s=0.0005",
    "--set", "kv_transfer.quarantine_s=1.5",
)  # fmt: skip


@pytest.fixture
def cluster(up: Up) -> Iterator[Cluster]:
    """Yield a cluster whose every worker lives; after a test, only killed workers may have died."""
    cluster = up("--prefill", "2", *POOL)
    wait_live(cluster, "prefill-0", "prefill-1", "decode-0")
    before = len(deaths(cluster))
    yield cluster
    wait_live(cluster, "prefill-0", "prefill-1", "decode-0")
    wait_idle(cluster, "prefill-0", "prefill-1", "decode-0")
    assert set(deaths(cluster)[before:]) <= {"prefill-0", "prefill-1"}


def pushing_worker(cluster: Cluster, num_blocks: int) -> str:
    """Return the prefill worker that works on an attempt, once it has pushed so many blocks of it
    (it pushes one attempt at a time here)."""
    start = {name: scrape(cluster, name) for name in ("prefill-0", "prefill-1")}

    def look() -> str | None:
        for name, before in start.items():
            now = scrape(cluster, name)
            pushed = "dovetail:blocks_pushed_total"
            if now.total(pushed) - before.total(pushed) >= num_blocks:
                return name
        return None

    return until(look, f"{num_blocks} blocks pushed")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_while_it_pushes(cluster: Cluster, seed: int) -> None:
    dice = random.Random(seed)
    fences = scrape(cluster, "decode-0").total("dovetail:fences_total")
    asked = Asked(cluster.url, prompt_of(NUM_TOKENS, seed), 24, disaggregate="always")
    victim = pushing_worker(cluster, dice.randrange(1, 150))
    dead = kill(cluster, victim)
    quarantined = until(
        lambda: scrape(cluster, "decode-0").blocks["quarantined"], "quarantined blocks"
    )
    assert quarantined == -(-NUM_TOKENS // 16)
    asked.expect_mock_answer()
    assert asked.path["prefill_worker"] != victim
    assert asked.path["attempt"] in (2, 3), "the fence may hit the second"
    wait_idle(cluster, "decode-0")
    assert scrape(cluster, "decode-0").total("dovetail:fences_total") == fences + 1
    # The pool holds less than three such prompts: these take the blocks that were quarantined.
    for salt in (10 * seed, 10 * seed + 1, 10 * seed + 2):
        Asked(cluster.url, prompt_of(NUM_TOKENS, 100 + salt), 24).expect_mock_answer()
    wait_restarted(cluster, victim, dead)


def test_killed_under_many_requests(cluster: Cluster) -> None:
    """Those of the other worker go on; nobody's blocks get mixed up."""
    asked = [Asked(cluster.url, prompt_of(300 + 40 * i, 50 + i), 40) for i in range(12)]
    victim = pushing_worker(cluster, 20)
    dead = kill(cluster, victim)
    for one in asked:
        one.expect_mock_answer()
    again = [Asked(cluster.url, prompt_of(300 + 40 * i, 70 + i), 40) for i in range(12)]
    for one in again:
        one.expect_mock_answer()
    wait_restarted(cluster, victim, dead)


def test_a_sink_goes_when_the_next_life_of_its_last_writer_is_reached(cluster: Cluster) -> None:
    decode = process(cluster, "decode-0")
    known = pool_address(decode)
    asked = Asked(cluster.url, prompt_of(NUM_TOKENS, 900), 24, disaggregate="always")
    victim = pushing_worker(cluster, 20)
    dead = kill(cluster, victim)
    asked.expect_mock_answer()
    wait_idle(cluster, "decode-0")
    assert pool_address(decode) != known, "fenced"
    assert is_mapped(decode, known), "writing to an unmapped address would end the process"
    wait_restarted(cluster, victim, dead)
    for salt in range(40):
        asked = Asked(cluster.url, prompt_of(64, 1000 + salt), 4, disaggregate="always")
        asked.expect_mock_answer()
        if asked.path["prefill_worker"] == victim:
            break
    until(lambda: not is_mapped(decode, known), "the end of the sink")
