"""What prefill and decode workers say of prompts: their log-probabilities, hits and counts, whoever
computes them and whatever dies meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from core.ids import Attempt, HandoffId, RequestId
from core.messages import HandoffScored
from core.request import EngineRequest, PromptLogprobs
from core.worker_record import Role
from decode_pool.live_request import RequestState
from kv_transfer.inprocess.model import Faults
from tests.integration.test_pools import until
from tests.pool_cluster import VOCAB, Answer, PoolCluster, finished, pool_cluster, request_of
from tests.prompt_scores import expected_scores, joined

pytestmark = pytest.mark.anyio


async def served(cluster: PoolCluster, answer: Answer, request: EngineRequest) -> Answer:
    await answer.until(lambda a: finished(a, request.sampling.n))
    cluster.expect(request, answer)
    return answer


def is_computing_here(cluster: PoolCluster) -> bool:
    stats = cluster.decode.stats()
    return stats is not None and stats.requests_by_state[RequestState.RUNNING] == 1


def check(request: EngineRequest, answer: Answer) -> None:
    assert joined(answer.scores) == expected_scores(request, VOCAB)


@pytest.mark.parametrize("n", [1, 3])
async def test_scores_survive_the_handoff_and_equal_the_colocated_ones(n: int) -> None:
    fields = {"n": n, "prompt_logprobs": 3, "temperature": 1.0}
    async with pool_cluster() as cluster:
        for name in ("cold", "warm"):  # then both caches hold the prompt
            request = request_of(name, range(10, 55), **fields)
            answer = cluster.router.start(request, cluster.candidates)
            trace = (await served(cluster, answer, request)).traces[-1]
            assert (trace.decision, trace.cached_tokens) == ("disaggregated", 0)
            assert trace.blocks_transferred == 12
            assert len(answer.scores) == 3, "one a chunk"
            check(request, answer)
            await cluster.until_idle()
        local = request_of("local", range(10, 55), **fields)
        answer = await served(cluster, cluster.router.start(local), local)
        assert answer.traces[-1].cached_tokens == 0
        check(local, answer)
        plain = request_of("plain", range(10, 55))
        answer = await served(cluster, cluster.router.start(plain, cluster.candidates), plain)
        assert (answer.scores, answer.traces[-1].decision) == ([], "local_hit")
        await cluster.until_idle()
    async with pool_cluster(num_prefills=0, role=Role.BOTH, chunk_tokens=512) as cluster:
        both = request_of("both", range(10, 55), **fields)
        answer = await served(cluster, cluster.router.start(both), both)
        assert len(answer.scores) == 1
        check(both, answer)


async def test_a_prefill_worker_that_dies_leaves_no_gap_and_nothing_twice() -> None:
    """Its chunks are told as they are computed; the next worker tells all of them again."""
    async with pool_cluster(num_prefills=2, prompt_token_s=0.002) as cluster:
        request = request_of("r", range(10, 80), prompt_logprobs=1)
        answer = cluster.router.start(request, cluster.candidates)
        await answer.until(lambda a: len(a.scores) == 2)
        await cluster.kill_prefill(0)
        await served(cluster, answer, request)
        assert answer.traces[-1].prefill_worker == "prefill-1"
        check(request, answer)
        await cluster.until_idle()


async def test_the_decode_worker_goes_on_alone() -> None:
    async with pool_cluster(prompt_token_s=0.002) as cluster:
        request = request_of("r", range(10, 80), prompt_logprobs=1)
        answer = cluster.router.start(request, cluster.candidates)
        await answer.until(lambda a: len(a.scores) == 2)
        await cluster.kill_prefill(0)
        await served(cluster, answer, request)
        assert answer.traces[-1].decision == "fallback"
        check(request, answer)
        await cluster.until_idle()


async def test_a_retry_behind_the_first_token_tells_nothing_again() -> None:
    """The token is out, its KV is not: the next attempt is forced, and asks for no scores."""
    faults = Faults(min_delay_s=0.2, max_delay_s=0.3)
    async with pool_cluster(num_prefills=2, faults=faults) as cluster:
        request = request_of("r", range(10, 40), prompt_logprobs=1)
        answer = cluster.router.start(request, cluster.candidates)
        await answer.until(lambda a: bool(a.tokens[0]))
        await cluster.kill_prefill(0)
        await served(cluster, answer, request)
        assert answer.traces[-1].prefill_worker == "prefill-1"
        check(request, answer)
        await cluster.until_idle()


async def test_a_gap_from_a_peer_costs_an_attempt_and_another_attempt_s_scores_nothing() -> None:
    async with pool_cluster(prompt_token_s=0.002) as cluster:
        request = request_of("r", range(10, 80), prompt_logprobs=0)
        answer = cluster.router.start(request, cluster.candidates)
        await answer.until(lambda a: len(a.scores) == 1)
        (stream,) = cluster.streams
        far = PromptLogprobs(60, (-9.0,), (9,))
        for attempt in (Attempt(1, 2), Attempt(1, 1)):
            handoff = HandoffId(request.request_id, attempt)
            stream.receive(HandoffScored(handoff, far))
        stream.receive(HandoffScored(HandoffId(RequestId("gone"), Attempt(1, 1)), far))
        await served(cluster, answer, request)
        assert answer.traces[-1].attempt == 2
        check(request, answer)
        await cluster.until_idle()


async def test_cached_tokens_are_not_those_of_a_later_attempt() -> None:
    """The first dies before it says what it found; the second holds the whole prompt."""
    async with pool_cluster(num_prefills=2, prompt_token_s=0.002) as cluster:
        first, second = cluster.candidates
        warm = request_of("warm", range(10, 80), max_tokens=1)
        await served(cluster, cluster.router.start(warm, (second,)), warm)
        await cluster.until_idle()
        longer = request_of("longer", [*range(10, 80), *range(200, 230)])
        answer = cluster.router.start(longer, (first, second))
        await until(lambda: cluster.prefills[0].num_attempts == 1)
        await cluster.kill_prefill(0)
        await served(cluster, answer, longer)
        trace = answer.traces[-1]
        assert trace.prefill_worker == "prefill-1"
        assert trace.blocks_reused_prefill == 17
        assert trace.cached_tokens == 0
        await cluster.until_idle()


async def test_a_refusal_is_no_attempt() -> None:
    async with pool_cluster(num_prefills=2) as cluster:
        first, second = cluster.candidates
        warm = request_of("warm", range(10, 50), max_tokens=1)
        await served(cluster, cluster.router.start(warm, (second,)), warm)
        await cluster.until_idle()
        cluster.prefills[0].refuse("draining")
        longer = request_of("longer", [*range(10, 50), *range(200, 230)])
        answer = await served(cluster, cluster.router.start(longer, (first, second)), longer)
        assert answer.traces[-1].cached_tokens == 40
        await cluster.until_idle()


async def test_a_prompt_counts_also_where_the_answer_ended_before_its_kv_came() -> None:
    """The client has its first token and leaves, or a stop string was in it."""
    faults = Faults(min_delay_s=0.05, max_delay_s=0.1)
    async with pool_cluster(num_prefills=2, faults=faults) as cluster:
        left = request_of("left", range(10, 40), max_tokens=20)
        answer = cluster.router.start(left, cluster.candidates)
        await answer.until(lambda a: bool(a.tokens[0]))
        cluster.router.abort(left)
        stats = await cluster.until_idle()
        assert (stats.prompt_tokens_received, stats.prompt_tokens_computed) == (30, 0)
        assert stats.prefix_queries == 30
        lost = request_of("lost", range(100, 140), max_tokens=1)
        answer = cluster.router.start(lost, cluster.candidates)
        await answer.until(lambda a: bool(a.reasons))
        await cluster.kill_prefill(0)
        stats = await cluster.until_idle()
        assert stats.prompt_tokens_received == 70
        never = request_of("never", range(200, 240), max_tokens=20)
        cluster.router.start(never, cluster.candidates)
        cluster.router.abort(never)
        await asyncio.sleep(0)
        stats = await cluster.until_idle()
        assert stats.prompt_tokens_received == 70, "no token of it was emitted"
        total = stats.prompt_tokens_received + stats.prompt_tokens_cached
        assert stats.prefix_queries == total + stats.prompt_tokens_computed


async def test_an_answer_cut_off_while_its_prompt_is_computed_again_counts_once() -> None:
    faults = Faults(min_delay_s=0.2, max_delay_s=0.3)
    async with pool_cluster(faults=faults, prompt_token_s=0.002) as cluster:
        request = request_of("r", range(10, 60), max_tokens=20)
        answer = cluster.router.start(request, cluster.candidates)
        await answer.until(lambda a: bool(a.tokens[0]))
        await cluster.kill_prefill(0)
        await until(lambda: is_computing_here(cluster))
        cluster.router.abort(request)
        stats = await cluster.until_idle()
        assert stats.prompt_tokens_computed == 50
        assert stats.prompt_tokens_received == 0
