"""Prefill workers, fabrics and engines that fail or fall silent: decode goes on, every token is the
oracle's, and afterwards every block is back."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kv_transfer.handoff.decode_messages import AttemptOutcome
from kv_transfer.inprocess.model import Faults
from kv_transfer.transport import Transport
from tests.pool_cluster import pool_cluster, request_of, served, until

pytestmark = pytest.mark.anyio


async def test_a_killed_prefill_worker_costs_a_later_first_token_only() -> None:
    faults = Faults(min_delay_s=0.005, max_delay_s=0.01)
    async with pool_cluster(num_prefills=2, faults=faults) as cluster:
        request = request_of("r", range(10, 70), max_tokens=8)
        answer = cluster.router.start(request, cluster.candidates)
        await cluster.pushing()
        await cluster.kill_prefill(0, buffered_descriptors=3)
        await served(answer, request)
        cluster.expect(request, answer)
        assert answer.traces[-1].prefill_worker == "prefill-1"
        assert answer.traces[-1].attempt == 2
        await cluster.until_idle()
        decode = cluster.decode.stats()
        assert decode is not None
        assert decode.fences == 1, "nobody can settle for the dead"
        assert cluster.decode_machine.region.generation == 1
        after = request_of("after", range(200, 260), max_tokens=8)
        answer = await served(cluster.router.start(after, cluster.candidates), after)
        cluster.expect(after, answer)
        await cluster.until_idle()


async def test_a_request_that_lacks_a_few_quarantined_blocks_has_them_soon() -> None:
    faults = Faults(min_delay_s=0.005, max_delay_s=0.01)
    async with pool_cluster(
        num_prefills=2, num_blocks=16, faults=faults, quarantine_s=60.0
    ) as cluster:
        request = request_of("r", range(10, 38), max_tokens=2)
        answer = cluster.router.start(request, cluster.candidates)
        await cluster.pushing()
        await cluster.kill_prefill(0)
        cluster.expect(request, await served(answer, request))
        stats = await cluster.decode_machine.stats()
        assert stats.blocks_quarantined == 7
        lacking_one = request_of("lacking", range(100, 140), max_tokens=2)
        answer = await served(cluster.router.start(lacking_one), lacking_one)
        cluster.expect(lacking_one, answer)
        await cluster.until_idle()


async def test_the_last_prefill_worker_dies_and_decode_computes_the_prompt() -> None:
    faults = Faults(min_delay_s=0.005, max_delay_s=0.01)
    async with pool_cluster(faults=faults) as cluster:
        request = request_of("r", range(10, 70), max_tokens=8)
        answer = cluster.router.start(request, cluster.candidates)
        await cluster.pushing()
        await cluster.kill_prefill(0)
        await served(answer, request)
        cluster.expect(request, answer)
        assert answer.traces[-1].decision == "fallback"
        assert cluster.decode.path_failure == ""  # its death says nothing of the path
        strict = request_of("strict", range(100, 160))
        answer = cluster.router.start(strict, cluster.candidates, allow_local=False)
        await answer.until(lambda a: a.failed is not None)
        assert answer.failed is not None
        assert answer.failed.retriable
        await cluster.until_idle()


async def test_a_prefill_worker_dies_between_first_token_and_kv() -> None:
    faults = Faults(min_delay_s=0.05, max_delay_s=0.06)
    async with pool_cluster(num_prefills=2, faults=faults) as cluster:
        request = request_of("r", range(10, 30), n=2, max_tokens=8, temperature=1.0, seed=9)
        answer = cluster.router.start(request, cluster.candidates)
        await answer.until(lambda a: len(a.tokens) == 2 and all(a.tokens.values()))
        await cluster.kill_prefill(0)
        await served(answer, request)
        cluster.expect(request, answer)
        await cluster.until_idle()


async def test_a_silent_prefill_worker_is_left_at_once() -> None:
    faults = Faults(min_delay_s=0.005, max_delay_s=0.01)
    async with pool_cluster(num_prefills=2, faults=faults, try_s=60.0) as cluster:
        request = request_of("r", range(10, 70))
        answer = cluster.router.start(request, cluster.candidates)
        await cluster.pushing()
        cluster.freeze_prefill(0)
        await served(answer, request)
        cluster.expect(request, answer)
        assert answer.traces[-1].prefill_worker == "prefill-1"
        await cluster.until_idle()


async def test_lost_descriptors_are_tried_again_and_free_the_writer() -> None:
    async with pool_cluster(faults=Faults(loss=1.0)) as cluster:
        request = request_of("r", range(10, 30))
        answer = await served(cluster.router.start(request, cluster.candidates), request)
        cluster.expect(request, answer)
        assert answer.traces[-1].decision == "fallback"
        decode = cluster.decode.stats()
        assert decode is not None
        assert decode.handoffs_by_outcome[AttemptOutcome.FAILED] == 2, (
            "once more on a fresh connection"
        )
        await cluster.until_idle()
        prefill = cluster.prefills[0].stats()
        assert prefill is not None
        assert prefill.agent_renewals >= 1
        cluster.fabric.faults = Faults()
        after = request_of("after", range(200, 260))
        answer = await served(cluster.router.start(after, cluster.candidates), after)
        cluster.expect(after, answer)
        assert answer.traces[-1].decision == "disaggregated"
        await cluster.until_idle()


async def test_a_lost_notification_ends_by_the_progress_deadline() -> None:
    faults = Faults(notification_loss=1.0)
    async with pool_cluster(faults=faults, try_s=0.3) as cluster:
        request = request_of("r", range(10, 30))
        answer = await served(cluster.router.start(request, cluster.candidates), request)
        cluster.expect(request, answer)
        assert answer.traces[-1].decision == "fallback"
        await cluster.until_idle()


async def test_waiting_in_a_prefill_queue_is_not_silence() -> None:
    async with pool_cluster(num_blocks=128, try_s=0.3, prompt_token_s=0.004) as cluster:
        requests = [request_of(f"r{i}", range(100 * i, 100 * i + 60)) for i in range(4)]
        answers = [cluster.router.start(request, cluster.candidates) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            cluster.expect(request, await served(answer, request))
            assert answer.traces[-1].decision == "disaggregated"
        queue_s = [answer.traces[-1].prefill_queue_s or 0.0 for answer in answers]
        assert max(queue_s) > 0.3, "longer than a try without progress"
        decode = cluster.decode.stats()
        assert decode is not None
        assert decode.handoffs_by_outcome[AttemptOutcome.COMPLETED] == 4
        await cluster.until_idle()


@pytest.mark.parametrize("victim", ["decode", "prefill"])
async def test_an_engine_that_fails_ends_its_worker_loudly(victim: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await break_an_engine(victim)
    assert caught.group_contains(AssertionError, match="a broken invariant")


@pytest.mark.parametrize("victim", ["decode", "prefill"])
async def test_a_fabric_that_fails_ends_its_worker_loudly(victim: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await break_a_fabric(victim)
    assert caught.group_contains(AssertionError, match="a broken transport")


class BrokenTransport:
    def notifications(self) -> None:
        msg = "a broken transport"
        raise AssertionError(msg)

    def close(self) -> None:
        """Nothing to destroy."""


async def break_a_fabric(victim: str) -> None:
    async with pool_cluster() as cluster:
        machine = cluster.decode_machine if victim == "decode" else cluster.prefill_machines[0]
        await until(lambda: bool(cluster.router.loads))  # started
        await machine.fabric.renew(lambda: cast("Transport", BrokenTransport()))
        machine.fabric.watch()
        await asyncio.wait([machine.task], timeout=5.0)


async def break_an_engine(victim: str) -> None:
    def fail(_: object) -> None:
        msg = "a broken invariant"
        raise AssertionError(msg)

    async with pool_cluster() as cluster:
        machine = cluster.decode_machine if victim == "decode" else cluster.prefill_machines[0]
        machine.engine.post(fail)
        await asyncio.wait([machine.task], timeout=5.0)
