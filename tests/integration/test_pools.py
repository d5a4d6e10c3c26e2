"""Prefill and decode workers together: real engines on the mock executor, real threads, a fabric in
memory with faults. Every token is compared with the oracle; afterwards every block is back."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from core.request import EngineRequest, FinishReason
from core.worker_record import Role
from kv_transfer.handoff.decode_messages import AttemptOutcome
from kv_transfer.inprocess.model import Faults
from tests.pool_cluster import EOS, Answer, PoolCluster, pool_cluster, request_of, served, until

pytestmark = pytest.mark.anyio


async def test_a_prompt_is_computed_elsewhere_and_its_tokens_equal_the_oracle() -> None:
    async with pool_cluster() as cluster:
        request = request_of("r", range(10, 40), max_tokens=8, logprobs=2)
        answer = await served(cluster.router.start(request, cluster.candidates), request)
        cluster.expect(request, answer)
        assert len(answer.logprobs[0]) == 8
        trace = answer.traces[-1]
        assert trace.decision == "disaggregated"
        assert trace.prefill_worker == "prefill-0"
        assert trace.blocks_transferred == 8
        assert trace.bytes_transferred == 8 * cluster.decode_machine.record.block_bytes
        assert trace.cached_tokens == 0
        assert trace.exposed_transfer_s is not None
        assert trace.prefill_s is not None
        stats = await cluster.until_idle()
        assert stats.prompt_tokens_received == 30
        assert stats.prompt_tokens_computed == 0


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 61])
async def test_every_length_around_a_block(num_tokens: int) -> None:
    async with pool_cluster() as cluster:
        request = request_of("r", range(10, 10 + num_tokens))
        answer = await served(cluster.router.start(request, cluster.candidates), request)
        cluster.expect(request, answer)
        assert answer.traces[-1].blocks_transferred == -(-num_tokens // 4)
        await cluster.until_idle()


async def test_one_token_and_a_forced_end_are_answered_by_the_prefill_worker() -> None:
    async with pool_cluster() as cluster:
        one = request_of("one", range(10, 30), max_tokens=1)
        end = request_of("end", range(50, 70), logit_bias=((EOS, 100.0),))
        answers = [await served(cluster.router.start(r, cluster.candidates), r) for r in (one, end)]
        cluster.expect(one, answers[0])
        assert answers[0].reasons == {0: FinishReason.LENGTH}
        assert answers[1].tokens[0] == [EOS]
        assert answers[1].reasons == {0: FinishReason.STOP}
        stats = await cluster.until_idle()
        assert stats.generated_tokens == 0, "decode computed nothing"
        assert stats.blocks_cached == 10, "the KV that came is kept for the next turn"


async def test_both_sides_learn_what_carries_the_kv() -> None:
    """Only a writer can see it; its next write tells the target."""
    async with pool_cluster() as cluster:
        for i in range(3):
            request = request_of(f"r{i}", range(100 * i, 100 * i + 20))
            await served(cluster.router.start(request, cluster.candidates), request)
        assert cluster.transports == {"prefill-0": ["inprocess"], "decode-0": ["inprocess"]}
        await cluster.until_idle()


async def test_samples_share_one_handoff() -> None:
    async with pool_cluster() as cluster:
        request = request_of("r", range(10, 24), n=4, max_tokens=5, seed=3, temperature=1.0)
        answer = await served(cluster.router.start(request, cluster.candidates), request)
        cluster.expect(request, answer)
        assert answer.traces[-1].blocks_transferred == 4
        await cluster.until_idle()


async def test_what_decode_holds_is_not_moved() -> None:
    async with pool_cluster() as cluster:
        first = request_of("first", range(10, 31), max_tokens=2)
        await served(cluster.router.start(first, cluster.candidates), first)
        await cluster.until_idle()
        longer = request_of("longer", range(10, 50), max_tokens=3)
        answer = await served(cluster.router.start(longer, cluster.candidates), longer)
        cluster.expect(longer, answer)
        trace = answer.traces[-1]
        assert (trace.blocks_reused_decode, trace.blocks_transferred) == (5, 5)
        assert trace.blocks_reused_prefill == 5
        assert trace.cached_tokens == 20
        again = request_of("again", range(10, 50), max_tokens=3)
        answer = await served(cluster.router.start(again, cluster.candidates), again)
        cluster.expect(again, answer)
        assert answer.traces[-1].decision == "local_hit"
        assert answer.traces[-1].prefill_s is not None
        assert answer.traces[-1].blocks_transferred == 0
        assert answer.traces[-1].cached_tokens == 36
        await cluster.until_idle()


async def test_local_colocated_and_strict() -> None:
    async with pool_cluster() as cluster:
        request = request_of("local", range(10, 30))
        answer = await served(cluster.router.start(request), request)
        cluster.expect(request, answer)
        assert answer.traces[-1].decision == "local"
        assert answer.traces[-1].prefill_s is not None
        assert answer.traces[-1].prefill_s > 0
        strict = request_of("strict", range(10, 30))
        answer = cluster.router.start(strict, allow_local=False)
        await answer.until(lambda a: a.refused is not None)
        assert answer.refused is not None
        assert answer.refused.reason == "no_prefill_worker"
        long = request_of("long", range(10, 300))
        answer = await served(cluster.router.start(long, cluster.candidates), long)
        assert answer.refused is not None
        assert answer.refused.reason == "too_long"
        assert answer.refused.load is not None
        assert answer.refused.load.blocks_total == 64
        await cluster.until_idle()
    async with pool_cluster(num_prefills=0, role=Role.BOTH) as cluster:
        request = request_of("both", range(10, 30))
        answer = await served(cluster.router.start(request), request)
        cluster.expect(request, answer)
        assert answer.traces[-1].decision == "colocated"
        assert answer.traces[-1].prefill_s is not None
        assert answer.traces[-1].prefill_s > 0


async def test_mixed_requests_with_random_aborts() -> None:
    dice = random.Random(5)
    faults = Faults(min_delay_s=0.0, max_delay_s=0.004)
    async with pool_cluster(num_prefills=2, num_blocks=48, faults=faults) as cluster:
        cluster.router.batch_sizes.clear()
        requests = [
            request_of(
                f"r{i}",
                range(base := dice.randrange(10, 60), base + dice.choice([1, 4, 9, 30, 44])),
                n=dice.choice([1, 1, 2, 3]),
                max_tokens=dice.choice([1, 2, 12]),
                temperature=1.0,
                seed=i,
            )
            for i in range(40)
        ]
        answers = [cluster.router.start(r, dice.choice([(), cluster.candidates])) for r in requests]
        aborted = set(dice.sample(range(40), 15))
        for index in aborted:
            await asyncio.sleep(dice.random() * 0.01)
            cluster.router.abort(requests[index])
        for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            if index not in aborted:
                await served(answer, request)
                cluster.expect(request, answer)
        await cluster.until_idle()


async def test_the_same_over_nixl() -> None:
    async with pool_cluster(num_prefills=2, backend="nixl") as cluster:
        requests = [request_of(f"r{i}", range(10 * i, 10 * i + 45), n=1 + i % 2) for i in range(8)]
        first, second = cluster.candidates
        answers = [
            cluster.router.start(r, (first, second) if i % 2 else (second, first))
            for i, r in enumerate(requests)
        ]
        for request, answer in zip(requests, answers, strict=True):
            await served(answer, request)
            cluster.expect(request, answer)
            assert answer.traces[-1].decision == "disaggregated"
        await cluster.until_idle()


async def test_an_aborted_write_settles_on_a_decode_worker_that_is_otherwise_idle() -> None:
    """NIXL leaves a write pending until its target polls; nobody may wait for a fence."""
    async with pool_cluster(backend="nixl", try_s=60.0, quarantine_s=60.0) as cluster:
        await until(lambda: bool(cluster.router.loads))  # started
        gate = threading.Event()
        held = cluster.decode_machine.fabric.call(lambda _: gate.wait(10.0))
        request = request_of("r", range(10, 70))
        cluster.router.start(request, cluster.candidates)
        await until(lambda: writes_pending(cluster) > 0)
        cluster.router.abort(request)
        await until(lambda: cluster.decode.num_requests == 0)
        gate.set()
        assert await held
        await cluster.until_idle(2.0)
        assert cluster.prefills[0].num_attempts == 0


async def test_a_frozen_decode_worker_does_not_keep_prefill_blocks() -> None:
    """It neither settles nor closes its stream, and writes to it stay pending for ever."""
    async with pool_cluster(backend="nixl", try_s=0.3, quarantine_s=0.2) as cluster:
        await until(lambda: bool(cluster.router.loads))  # started
        gate = threading.Event()
        cluster.decode_machine.fabric.call(lambda _: gate.wait(10.0))
        request = request_of("r", range(10, 70))
        answer = cluster.router.start(request, cluster.candidates)
        await until(lambda: writes_pending(cluster) > 0)
        for stream in cluster.streams:
            stream.other.is_frozen = True
        await until(lambda: cluster.prefills[0].num_attempts == 0)
        gate.set()
        cluster.expect(request, await served(answer, request))
        await cluster.until_idle()


def writes_pending(cluster: PoolCluster) -> int:
    """Of the first prefill worker."""
    stats = cluster.prefills[0].stats()
    return 0 if stats is None else stats.writes_pending


@pytest.mark.parametrize("seed", [1, 2])
async def test_everything_at_once(seed: int) -> None:
    """Delays, losses, small pools, aborts, a death and a freeze under load."""
    dice = random.Random(seed)
    faults = Faults(max_delay_s=0.01, loss=0.02, notification_loss=0.02)
    async with pool_cluster(
        num_prefills=3,
        num_blocks=32,
        prefill_blocks=32,
        max_inflight=2,
        faults=faults,
        try_s=0.3,
        quarantine_s=0.2,
    ) as cluster:
        started: list[tuple[EngineRequest, Answer]] = []
        aborted: set[int] = set()
        for i in range(50):
            base = dice.randrange(10, 60)
            request = request_of(
                f"r{i}",
                range(base, base + dice.choice([1, 4, 9, 30, 60])),
                n=dice.choice([1, 1, 2, 3]),
                max_tokens=dice.choice([1, 2, 12]),
                temperature=1.0,
                seed=i,
                logit_bias=dice.choice([(), (), ((EOS, 100.0),)]),
            )
            order = dice.sample(cluster.candidates, 3)
            started.append((request, cluster.router.start(request, tuple(order))))
            if dice.random() < 0.3:
                index = dice.randrange(len(started))
                aborted.add(index)
                cluster.router.abort(started[index][0], dice.choice([None, 0]))
            if i == 20:
                await cluster.kill_prefill(0, buffered_descriptors=2)
            if i == 35:
                cluster.freeze_prefill(1)
            await asyncio.sleep(dice.random() * 0.01)
        for index, (request, answer) in enumerate(started):
            if index not in aborted:
                await served(answer, request)
                cluster.expect(request, answer)
        await cluster.until_idle()


async def test_one_sample_is_aborted_on_its_way() -> None:
    faults = Faults(min_delay_s=0.01, max_delay_s=0.02)
    async with pool_cluster(faults=faults) as cluster:
        request = request_of("r", range(10, 30), n=2, max_tokens=8, seed=1, temperature=1.0)
        answer = cluster.router.start(request, cluster.candidates)
        await answer.until(lambda a: bool(a.tokens[0]))
        cluster.router.abort(request, 1)
        await answer.until(lambda a: 0 in a.reasons)
        assert 1 not in answer.reasons
        await cluster.until_idle()


async def test_a_stop_string_in_the_first_token_lets_the_kv_arrive() -> None:
    faults = Faults(min_delay_s=0.01, max_delay_s=0.02)
    async with pool_cluster(faults=faults) as cluster:
        request = request_of("r", range(10, 30))
        answer = cluster.router.start(request, cluster.candidates)
        await answer.until(lambda a: bool(a.tokens[0]))
        cluster.router.abort(request, 0)
        stats = await cluster.until_idle()
        assert len(answer.tokens[0]) == 1
        assert stats.blocks_cached == 5


async def test_a_router_that_leaves_ends_its_requests() -> None:
    async with pool_cluster(faults=Faults(min_delay_s=0.01, max_delay_s=0.02)) as cluster:
        for i in range(6):
            request = request_of(f"r{i}", range(10 * i, 10 * i + 30), max_tokens=100)
            cluster.router.start(request, cluster.candidates)
        await cluster.pushing()
        cluster.router.stream.close("gone")
        await cluster.until_idle(2.0)


async def test_a_request_has_a_deadline_wherever_it_stands() -> None:
    faults = Faults(notification_loss=1.0)
    async with pool_cluster(faults=faults, try_s=60.0) as cluster:
        receiving = request_of("receiving", range(10, 30))
        running = request_of("running", range(10, 30), max_tokens=200)
        answers = [
            cluster.router.start(receiving, cluster.candidates, remaining_s=0.3),
            cluster.router.start(running, remaining_s=0.05),
        ]
        for answer in answers:
            await answer.until(lambda a: a.failed is not None)
            assert answer.failed is not None
            assert not answer.failed.retriable
        await cluster.until_idle()


async def test_a_newer_dispatch_goes_on_from_the_tokens_so_far() -> None:
    async with pool_cluster() as cluster:
        request = request_of("r", range(10, 30), max_tokens=9)
        first = cluster.router.start(request, cluster.candidates)
        await first.until(lambda a: len(a.tokens[0]) >= 3)
        outputs = (tuple(first.tokens[0]),)
        going_on = EngineRequest(request.request_id, request.prompt, request.sampling, outputs)
        second = cluster.router.start(going_on, cluster.candidates, dispatch=2)
        await served(second, request)
        cluster.expect(request, second)
        await cluster.until_idle()


async def test_routers_hear_the_load_and_drained_workers_refuse() -> None:
    async with pool_cluster() as cluster:
        await asyncio.sleep(0.12)
        assert cluster.router.loads[-1].blocks_total == 64
        cluster.decode.refuse("draining")
        request = request_of("r", range(10, 30))
        answer = await served(cluster.router.start(request, cluster.candidates), request)
        assert answer.refused is not None
        assert answer.refused.reason == "draining"


async def test_a_prefill_worker_that_refuses_is_passed_over() -> None:
    async with pool_cluster(num_prefills=2, prefill_blocks=8) as cluster:
        cluster.prefills[0].refuse("draining")
        request = request_of("r", range(10, 30))
        answer = await served(cluster.router.start(request, cluster.candidates), request)
        cluster.expect(request, answer)
        assert answer.traces[-1].prefill_worker == "prefill-1"
        too_long_for_it = request_of("long", range(10, 70))
        answer = cluster.router.start(too_long_for_it, cluster.candidates)
        cluster.expect(too_long_for_it, await served(answer, too_long_for_it))
        assert answer.traces[-1].decision == "fallback"
        decode = cluster.decode.stats()
        assert decode is not None
        assert decode.handoffs_by_outcome[AttemptOutcome.REFUSED] == 3
        assert decode.quarantine_s == 0.0, "nothing was written, nothing is quarantined"
        await cluster.until_idle()


async def test_the_record_of_a_preemption_goes_when_the_request_runs_again_or_ends() -> None:
    async with pool_cluster(num_blocks=14) as cluster:
        requests = [
            request_of(f"r{k}", range(10 * k, 10 * k + 8), max_tokens=30) for k in range(1, 4)
        ]
        answers = [cluster.router.start(request, ()) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            cluster.expect(request, await served(answer, request))
        await cluster.until_idle()
    recorded = [request_id for what, request_id in cluster.preemptions if what == "preempted"]
    removed = [request_id for what, request_id in cluster.preemptions if what == "resumed"]
    assert recorded, "the pool is too small for three requests"
    assert sorted(recorded) == sorted(removed)
    assert set(recorded) <= {request.request_id for request in requests}
