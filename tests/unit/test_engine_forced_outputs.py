"""Outputs that are known already: what a re-dispatched stream costs."""

from __future__ import annotations

from core.ids import RequestId
from core.request import EngineRequest
from engine.events import Admitted, CacheChanged, Generated, Mode, Reserved
from engine.executor.mock_tokens import expected_tokens
from tests.replica import VOCAB, Replica
from tests.unit.test_engine_scheduler import LONG, handoff_of, of_kind, request_of


def with_outputs(name: str, *lengths: int, max_tokens: int = 60) -> EngineRequest:
    """A request for LONG, of whose samples so many tokens are known."""
    plain = request_of(name, LONG, n=len(lengths), max_tokens=max_tokens)
    outputs = tuple(
        expected_tokens(plain.prompt, plain.sampling, vocab_size=VOCAB, sample_index=index)[:length]
        for index, length in enumerate(lengths)
    )
    return request_of(name, LONG, n=len(lengths), max_tokens=max_tokens, outputs=outputs)


def add(replica: Replica, request: EngineRequest) -> RequestId:
    replica.requests[request.request_id] = request
    replica.engine.add(request, Mode.LOCAL)
    return request.request_id


def test_prompt_and_forced_outputs_are_one_chunk_that_ends_in_a_sample() -> None:
    replica = Replica()
    request_id = add(replica, with_outputs("again", 30))
    (generated,) = of_kind(replica.step(), Generated)
    (work,) = replica.plans[0].work
    assert (work.num_query, work.num_samples) == (80, 1)
    assert generated.start_index == 30
    assert replica.engine.stats().generated_tokens == 1
    replica.run()
    assert replica.outputs(request_id) == replica.expected(request_id)
    replica.assert_idle()


def test_chunks_of_prompt_and_outputs_end_on_block_borders() -> None:
    replica = Replica(chunk_tokens=40)
    add(replica, with_outputs("again", 40))
    replica.run()
    assert [plan.work[0].num_query for plan in replica.plans[:3]] == [32, 32, 26]
    replica.assert_all_right()
    replica.assert_idle()


def test_a_stream_dispatched_again_finds_its_outputs_in_the_cache() -> None:
    replica = Replica()
    replica.add(LONG, seed=5, max_tokens=60)
    replica.run()
    request_id = add(replica, with_outputs("again", 30))
    num_plans = len(replica.plans)
    (admitted,) = of_kind(replica.step(), Admitted)
    assert admitted.cached_tokens == 50  # of the prompt; with outputs 64 were found
    (work,) = replica.plans[num_plans].work
    assert work.num_query == 80 - 64
    replica.run()
    assert replica.outputs(request_id) == replica.expected(request_id)
    replica.assert_idle()


def test_outputs_that_end_on_a_border_leave_their_last_block_to_compute() -> None:
    replica = Replica()
    replica.add(LONG, seed=5, max_tokens=60)
    replica.run()
    num_plans = len(replica.plans)
    add(replica, with_outputs("again", 46))  # 96 tokens, six blocks
    replica.run()
    assert replica.plans[num_plans].work[0].num_query == 16
    assert replica.outputs(RequestId("again")) == replica.expected(RequestId("again"))


def test_recomputed_outputs_are_matchable_while_their_sample_still_runs() -> None:
    replica = Replica()
    add(replica, with_outputs("again", 30))
    replica.step()
    (changed,) = of_kind(replica.events, CacheChanged)
    assert len(changed.stored) == 5  # 80 computed tokens


def test_each_sample_finds_its_own_outputs_after_the_fork() -> None:
    replica = Replica()
    replica.add(LONG, n=3, seed=5, max_tokens=60)
    replica.run()
    num_plans = len(replica.plans)
    request_id = add(replica, with_outputs("again", 30, 40, 2))
    replica.run()
    chunks = [
        work.num_query
        for plan in replica.plans[num_plans:]
        for work in plan.work
        if work.num_query > 1
    ]
    # The prompt's last two tokens; the samples' from their last border on; the third has no block
    # of its own, and computes one known token beside the last.
    assert sorted(chunks) == [2, 2, 90 - 80, 80 - 64]
    for index in range(3):
        assert replica.outputs(request_id, index) == replica.expected(request_id, index)
    replica.assert_idle()


def test_a_request_that_needs_no_handoff_goes_on_with_outputs_that_are_here() -> None:
    replica = Replica()
    replica.add(LONG, seed=5, max_tokens=60)
    replica.run()
    num_plans = len(replica.plans)
    request = with_outputs("again", 30)
    replica.requests[request.request_id] = request
    replica.engine.add(request, Mode.RECEIVE, handoff=handoff_of("again"))
    replica.run()  # all reusable blocks are here: no handoff
    assert replica.outputs(request.request_id) == replica.expected(request.request_id)
    num_query = [plan.work[0].num_query for plan in replica.plans[num_plans:]]
    assert num_query == [80 - 64 - 1] + [1] * 30
    replica.assert_idle()


def test_a_lone_sample_receives_the_kv_of_its_outputs_too() -> None:
    replica = Replica()
    request, handoff = with_outputs("again", 30), handoff_of("again")
    replica.requests[request.request_id] = request
    replica.engine.add(request, Mode.RECEIVE, handoff=handoff)
    (reserved,) = of_kind(replica.step(), Reserved)
    assert len(reserved.block_ids) == 5  # of 16: 79 tokens, the last is still to be computed
    replica.write_kv(request.carried, reserved.block_ids, 0)
    replica.engine.kv_arrived(handoff, (), num_received=50)
    replica.run()
    assert replica.outputs(request.request_id) == replica.expected(request.request_id)
    assert {work.num_query for plan in replica.plans for work in plan.work} == {1}
    replica.assert_idle()


def test_of_several_samples_the_prompt_s_kv_is_received() -> None:
    replica = Replica()
    request, handoff = with_outputs("again", 30, 20), handoff_of("again")
    replica.engine.add(request, Mode.RECEIVE, handoff=handoff)
    (reserved,) = of_kind(replica.step(), Reserved)
    assert len(reserved.block_ids) == 4
    assert request.carried == request.prompt
    assert request.for_peer() is request


def test_a_peer_is_asked_for_the_outputs_of_a_lone_sample_as_for_a_prompt() -> None:
    request = with_outputs("again", 3)
    (outputs,) = request.outputs
    asked = request.for_peer()
    assert asked.prompt == request.carried == (*LONG, *outputs[:2])
    assert asked.outputs == (outputs[2:],)
    fresh = with_outputs("again", 0)
    assert fresh.for_peer().prompt == fresh.carried == tuple(LONG)


def test_a_trunk_that_lost_its_blocks_forks_when_all_is_computed_again() -> None:
    replica = Replica(chunk_tokens=32)
    request = with_outputs("again", 45)
    replica.requests[request.request_id] = request
    replica.engine.add(request, Mode.RECEIVE, handoff=handoff_of("again"))
    state = replica.scheduler.state
    (trunk,) = state.runs[request.request_id].sequences
    state.turn_local(trunk)  # as when all was here, before it was preempted
    replica.run()
    assert [plan.work[0].num_query for plan in replica.plans[:4]] == [32, 32, 30, 1]
    assert replica.outputs(request.request_id) == replica.expected(request.request_id)
    replica.assert_all_right()
    replica.assert_idle()
