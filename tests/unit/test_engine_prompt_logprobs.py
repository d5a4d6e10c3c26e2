"""Prompts' log-probabilities out of an engine: each told once, in order, before any token."""

from __future__ import annotations

import pytest

from core.ids import RequestId
from core.request import EngineRequest, PromptLogprobs
from core.sampling_params import SamplingParams
from engine.events import Admitted, Generated, Mode, Reserved, Scored
from tests.prompt_scores import expected_scores, joined
from tests.replica import EOS, VOCAB, Replica
from tests.unit.test_engine_scheduler import LONG, handoff_of, of_kind


def scored_request(*outputs: tuple[int, ...]) -> EngineRequest:
    sampling = SamplingParams(max_tokens=5, eos_token_ids=(EOS,), prompt_logprobs=2)
    return EngineRequest(RequestId("scored"), tuple(LONG), sampling, outputs)


def scores_of(replica: Replica, request_id: RequestId) -> list[PromptLogprobs]:
    """Return a request's scores; asserts that all came before its first token."""
    events = [e for e in replica.events if isinstance(e, Scored | Generated)]
    own = [e for e in events if e.request_id == request_id]
    kinds = [isinstance(event, Scored) for event in own]
    assert kinds == sorted(kinds, reverse=True), "a score after a token"
    return [event.logprobs for event in own if isinstance(event, Scored)]


def check(replica: Replica, request_id: RequestId) -> None:
    expected = expected_scores(replica.requests[request_id], VOCAB)
    assert joined(scores_of(replica, request_id)) == expected


@pytest.mark.parametrize("chunk_tokens", [16, 32, 512])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_inflight", [1, 2])
def test_chunks_say_the_same_as_a_whole_prompt(
    chunk_tokens: int, n: int, max_inflight: int
) -> None:
    replica = Replica(chunk_tokens=chunk_tokens, max_inflight=max_inflight)
    request_id = replica.add(LONG, n=n, max_tokens=5, prompt_logprobs=2)
    replica.run()
    assert len(scores_of(replica, request_id)) == -(-len(LONG) // min(chunk_tokens, len(LONG)))
    check(replica, request_id)
    replica.assert_all_right()
    replica.assert_idle()


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 33])
def test_every_length_around_a_block(num_tokens: int) -> None:
    replica = Replica(chunk_tokens=16)
    request_id = replica.add(LONG[:num_tokens], max_tokens=1, prompt_logprobs=0)
    replica.run()
    check(replica, request_id)


def test_a_prompt_of_one_token_has_none() -> None:
    replica = Replica()
    request_id = replica.add(LONG[:1], max_tokens=2, prompt_logprobs=3)
    replica.run()
    assert scores_of(replica, request_id) == []
    replica.assert_all_right()


def test_the_cache_is_filled_but_not_read() -> None:
    replica = Replica()
    plain = replica.add(LONG, max_tokens=2)
    replica.run()
    scored = replica.add(LONG, max_tokens=2, prompt_logprobs=1)
    replica.run()
    again = replica.add(LONG, max_tokens=2)
    replica.run()
    cached = [event.cached_tokens for event in of_kind(replica.events, Admitted)]
    assert cached == [0, 0, 48]
    assert scores_of(replica, plain) == scores_of(replica, again) == []
    check(replica, scored)
    replica.assert_all_right()


def test_only_slots_that_ask_are_scored() -> None:
    replica = Replica()
    replica.add(LONG, max_tokens=2)
    replica.add(LONG[:20], max_tokens=2, prompt_logprobs=4)
    replica.run()
    added = [one for plan in replica.plans for one in plan.added]
    assert [one.prompt_logprobs for one in added] == [None, 4]


def preempt(replica: Replica) -> None:
    state = replica.scheduler._state
    (sequence,) = state.batch
    state.preempt(sequence)


def test_preempted_behind_its_prompt() -> None:
    replica = Replica()
    request_id = replica.add(LONG, max_tokens=30, prompt_logprobs=2)
    for _ in range(20):
        replica.step()
    preempt(replica)
    replica.run()
    assert replica.plans[20].added[0].num_computed == 64, "nothing is left to score: all are hits"
    check(replica, request_id)
    replica.assert_all_right()


def test_preempted_in_the_midst_of_its_prompt() -> None:
    replica = Replica(chunk_tokens=16)
    request_id = replica.add(LONG, max_tokens=3, prompt_logprobs=2)
    replica.step()
    replica.step()
    preempt(replica)
    replica.run()
    readmitted = replica.plans[2].added[0]
    assert readmitted.num_computed == 32, "blocks whose tokens were scored are found again"
    check(replica, request_id)
    replica.assert_all_right()


def test_preempted_and_evicted() -> None:
    replica = Replica(chunk_tokens=16)
    request_id = replica.add(LONG, max_tokens=3, prompt_logprobs=2)
    replica.step()
    replica.step()
    preempt(replica)
    memory = replica.scheduler._state.memory
    memory._make_room(memory.pool.num_blocks)
    replica.run()
    assert replica.plans[2].added[0].num_computed == 0
    check(replica, request_id)
    replica.assert_all_right()


def test_the_last_known_token_sampled_again_is_not_scored_again() -> None:
    """Where nothing is accepted, the prompt's last row is computed twice."""
    refusals = iter([0, 0])
    replica = Replica(chunk_tokens=16, accept=lambda count: next(refusals, count))
    request_id = replica.add(LONG[:20], max_tokens=3, prompt_logprobs=1)
    replica.run()
    check(replica, request_id)
    replica.assert_all_right()


def test_a_peer_s_prompt_is_asked_for_whole_and_scored_there() -> None:
    here, peer = Replica(), Replica(chunk_tokens=16)
    for replica in (here, peer):
        replica.add(LONG, max_tokens=1)
        replica.run()
    request = scored_request()
    handoff = handoff_of("scored")
    here.requests[request.request_id] = peer.requests[request.request_id] = request
    here.engine.add(request, Mode.RECEIVE, handoff=handoff)
    peer.engine.add(request, Mode.PREFILL)
    (reserved,) = of_kind(here.step(), Reserved)
    assert reserved.num_cached_blocks == 0
    peer.run()
    check(peer, request.request_id)
    (first,) = peer.outputs(request.request_id)
    here.write_kv(LONG, reserved.block_ids, 0)
    here.engine.kv_arrived(handoff, (first,), num_received=len(LONG))
    here.step()
    preempt(here)
    here.run()
    recomputed = [one for plan in here.plans for one in plan.added][-1]
    assert recomputed.num_computed == 48, "nothing is left to score here"
    assert of_kind(here.events, Scored) == []
    assert (first, *here.outputs(request.request_id)) == here.expected(request.request_id)
    state = here.scheduler._state
    assert not state.runs


def test_forced_outputs_mean_that_the_prompt_was_told() -> None:
    replica = Replica()
    replica.add(LONG, max_tokens=2)
    replica.run()
    request = scored_request((3,))
    assert (scored_request().wants_prompt_logprobs, request.wants_prompt_logprobs) == (True, False)
    replica.requests[request.request_id] = request
    replica.engine.add(request, Mode.LOCAL)
    replica.run()
    assert of_kind(replica.events, Scored) == []
    assert of_kind(replica.events, Admitted)[-1].cached_tokens == 48
