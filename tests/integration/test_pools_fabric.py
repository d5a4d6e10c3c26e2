"""Slow, lossy, corrupting and broken fabrics under real pools: every token is the oracle's, late
completions change nothing, and workers say themselves when no path works."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from decode_pool.metrics import DecodeCollector
from kv_transfer.handoff.decode_messages import AttemptOutcome
from kv_transfer.inprocess.model import Faults
from tests.pool_cluster import (
    VOCAB,
    Answer,
    PoolCluster,
    expected_tokens,
    pool_cluster,
    request_of,
    served,
    until,
)

pytestmark = pytest.mark.anyio

CORRUPTING = Faults(corruption=1.0)


def corrupt_writes(cluster: PoolCluster) -> float:
    registry = CollectorRegistry()
    registry.register(DecodeCollector(cluster.decode.stats))
    return registry.get_sample_value("dovetail:corrupt_writes_total") or 0.0


def outcomes(cluster: PoolCluster, outcome: AttemptOutcome) -> int:
    stats = cluster.decode.stats()
    assert stats is not None
    return stats.handoffs_by_outcome[outcome]


async def run(cluster: PoolCluster, name: str, first: int = 10) -> Answer:
    """Serve a request of 60 tokens, and compare it with the oracle."""
    request = request_of(name, range(first, first + 60), max_tokens=8)
    answer = await served(cluster.router.start(request, cluster.candidates), request)
    cluster.expect(request, answer)
    return answer


async def test_without_verification_a_corrupted_block_is_a_wrong_answer() -> None:
    """One byte in four is a mark: eight requests of four writes will lose one."""
    async with pool_cluster(num_blocks=256, prefill_blocks=256, faults=CORRUPTING) as cluster:
        requests = [request_of(f"r{i}", range(90 * i, 90 * i + 60)) for i in range(1, 9)]
        answers = [cluster.router.start(request, cluster.candidates) for request in requests]
        wrong = 0
        for request, answer in zip(requests, answers, strict=True):
            await served(answer, request)
            wanted = expected_tokens(
                request.prompt, request.sampling, vocab_size=VOCAB, sample_index=0
            )
            wrong += tuple(answer.tokens[0]) != wanted
        assert wrong
        assert corrupt_writes(cluster) == 0


async def test_a_corrupted_write_is_found_and_its_request_computed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pool_cluster(faults=CORRUPTING, verify=True) as cluster:
        answer = await run(cluster, "r")
        assert answer.traces[-1].decision == "fallback", "everything that lands is corrupted"
        assert corrupt_writes(cluster) >= 2, "once more on a fresh connection"
        assert outcomes(cluster, AttemptOutcome.FAILED) == 2
        told = [r for r in caplog.records if "are not as they left" in r.getMessage()]
        assert told[0].getMessage().startswith("r/1.1: prompt blocks ")
        assert vars(told[0])["request_id"] == "r"
        await cluster.until_idle()
        cluster.fabric.faults = Faults()
        before = corrupt_writes(cluster)
        answer = await run(cluster, "after", 200)
        assert (answer.traces[-1].decision, answer.traces[-1].attempt) == ("disaggregated", 1)
        assert corrupt_writes(cluster) == before
        await cluster.until_idle()


async def test_one_corrupted_write_costs_one_attempt_on_fresh_blocks() -> None:
    async with pool_cluster(faults=CORRUPTING, verify=True, chunk_tokens=64) as cluster:
        request = request_of("r", range(10, 70), max_tokens=8)
        answer = cluster.router.start(request, cluster.candidates)
        await until(lambda: corrupt_writes(cluster) == 1)
        cluster.fabric.faults = Faults()
        await served(answer, request)
        cluster.expect(request, answer)
        assert answer.traces[-1].decision in {"disaggregated", "fallback"}
        assert answer.traces[-1].attempt == 2
        await cluster.until_idle()


async def test_sums_hold_over_nixl_for_shared_prefixes_and_several_samples() -> None:
    async with pool_cluster(backend="nixl", verify=True) as cluster:
        for name, end in (("r0", 70), ("r1", 90), ("r2", 73)):
            request = request_of(name, range(10, end), n=2, max_tokens=6)
            answer = await served(cluster.router.start(request, cluster.candidates), request)
            cluster.expect(request, answer)
            assert answer.traces[-1].decision != "fallback"
        assert corrupt_writes(cluster) == 0
        await cluster.until_idle()


async def test_a_slow_fabric_is_waited_for_as_long_as_it_goes_on() -> None:
    """A sixth of a second for each of a write's three events, as 6 s with a try of 10 s."""
    faults = Faults(min_delay_s=0.15, max_delay_s=0.18)
    async with pool_cluster(num_blocks=128, faults=faults, try_s=0.9) as cluster:
        slow = request_of("slow", range(10, 70), max_tokens=8)
        answer = cluster.router.start(slow, cluster.candidates)
        await cluster.pushing()
        quick = request_of("quick", range(300, 320), max_tokens=8)
        cluster.expect(quick, await served(cluster.router.start(quick), quick))
        assert not answer.reasons, "nobody waited for it"
        cluster.expect(slow, await served(answer, slow))
        assert (answer.traces[-1].decision, answer.traces[-1].attempt) == ("disaggregated", 1)
        await cluster.until_idle()


async def test_what_lands_after_its_attempt_was_given_up_changes_nothing() -> None:
    """Slower than a try: each attempt's writes land while the next, or nobody, is waiting."""
    faults = Faults(min_delay_s=0.25, max_delay_s=0.3)
    async with pool_cluster(num_blocks=128, faults=faults, try_s=0.2, quarantine_s=5.0) as cluster:
        answer = await run(cluster, "r")
        assert answer.traces[-1].decision == "fallback"
        await cluster.until_idle()
        late = list(cluster.arrived)
        assert late, "they came all the same"
        assert outcomes(cluster, AttemptOutcome.COMPLETED) == 0
        cluster.fabric.faults = Faults()
        await run(cluster, "after", 200)
        before = cluster.decode.stats()
        for notification in late:  # once more, of attempts that are long settled
            cluster.decode.on_notification(notification)
        await run(cluster, "last", 400)
        await cluster.until_idle()
        after = cluster.decode.stats()
        assert before is not None
        assert after is not None
        assert after.fences == before.fences


async def test_a_worker_says_when_no_path_works_and_when_one_does_again() -> None:
    async with pool_cluster(faults=Faults(loss=1.0)) as cluster:
        prefill = cluster.prefills[0]
        assert (prefill.path_failure, cluster.decode.path_failure) == ("", "")
        assert (await run(cluster, "r")).traces[-1].decision == "fallback"
        for said in (prefill.path_failure, cluster.decode.path_failure):
            assert said.startswith("no KV moves to or from any of 1 peers: "), said
        await until(lambda: cluster.router.loads[-1].is_unpaired)
        assert cluster.router.loads[-1].path_failure == cluster.decode.path_failure
        long = request_of("long", range(10, 300))
        refused = (await served(cluster.router.start(long, cluster.candidates), long)).refused
        assert refused is not None
        assert refused.load is not None
        assert refused.load.path_failure == cluster.decode.path_failure
        cluster.fabric.faults = Faults()
        assert (await run(cluster, "after", 200)).traces[-1].decision == "disaggregated"
        assert (prefill.path_failure, cluster.decode.path_failure) == ("", "")
        await until(lambda: not cluster.router.loads[-1].path_failure)
        assert not cluster.router.loads[-1].is_unpaired
        await cluster.until_idle()


async def test_lost_notifications_are_the_decode_workers_to_tell() -> None:
    """Its peer saw every write end well."""
    async with pool_cluster(faults=Faults(notification_loss=1.0), try_s=0.3) as cluster:
        assert (await run(cluster, "r")).traces[-1].decision == "fallback"
        assert "KV does not come" in cluster.decode.path_failure
        assert cluster.prefills[0].path_failure == ""
        await cluster.until_idle()
