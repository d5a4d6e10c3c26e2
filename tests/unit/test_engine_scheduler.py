"""Scenarios of the scheduler, each on a whole engine with the mock executor."""

from __future__ import annotations

import msgspec
import pytest

from core.errors import RequestError
from core.ids import RequestId
from core.request import EngineRequest, FinishReason
from engine.events import (
    Admitted,
    Generated,
    Mode,
    Preempted,
    Reserved,
)
from engine.executor.mock_tokens import expected_tokens
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_work import StepWork
from tests.engine_requests import LONG, handoff_of, of_kind, request_of
from tests.replica import EOS, VOCAB, Replica


def test_n_samples_compute_the_prompt_once_and_clone_only_the_tail() -> None:
    replica = Replica()
    request_id = replica.add(LONG, n=4, max_tokens=8)
    replica.step()
    replica.step()
    stats = replica.engine.stats()
    assert stats.prompt_tokens_computed == 50
    assert stats.blocks_owned == 3 + 4  # three shared full blocks, four tails
    assert stats.block_copies == 3  # the last sharer wrote in place
    (copies,) = [plan.copies for plan in replica.plans if plan.copies]
    assert len({copy.source for copy in copies}) == 1
    replica.run()
    replica.assert_all_right()
    outputs = {replica.outputs(request_id, index) for index in range(4)}
    assert len(outputs) == 4
    assert sum(plan.num_prompt_tokens for plan in replica.plans) == 50
    replica.assert_idle()


def test_running_sequences_get_a_token_in_every_step_with_a_chunk() -> None:
    replica = Replica(num_blocks=200, chunk_tokens=32)
    running = [replica.add([i, i + 1, i + 2], max_tokens=40) for i in range(100, 104)]
    replica.step()
    replica.add(list(range(300, 900)), max_tokens=4)
    before = {request_id: len(replica.outputs(request_id)) for request_id in running}
    for num_steps in range(1, 19):  # 600 prompt tokens at 32 a step
        replica.step()
        assert replica.plans[-1].num_prompt_tokens > 0
        for request_id in running:
            assert len(replica.outputs(request_id)) == before[request_id] + num_steps
    replica.run()
    replica.assert_all_right()


def test_chunks_end_on_block_borders_and_several_prompts_share_a_step() -> None:
    replica = Replica(chunk_tokens=40)
    for start in (100, 200, 300):
        replica.add(list(range(start, start + 30)), max_tokens=1)
    replica.step()
    assert [work.num_query for work in replica.plans[0].work] == [30]
    replica.run()
    assert all(plan.num_prompt_tokens <= 40 for plan in replica.plans)
    replica = Replica(chunk_tokens=40)
    replica.add(list(range(100, 120)), max_tokens=1)
    replica.add(list(range(200, 260)), max_tokens=1)
    replica.step()
    assert [work.num_query for work in replica.plans[0].work] == [20, 16]


def test_a_repeated_prompt_reuses_all_but_the_last_token() -> None:
    replica = Replica()
    prompt = list(range(100, 148))  # exactly three blocks
    replica.add(prompt, max_tokens=2)
    replica.run()
    replica.add(prompt, max_tokens=2)
    replica.run()
    first, second = of_kind(replica.events, Admitted)
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    stats = replica.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (96, 32)
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_cached) == (64, 32)
    replica.assert_all_right()


def test_partial_tails_are_zeroed_before_use() -> None:
    replica = Replica(num_blocks=8)
    request_id = replica.add(LONG[:20], max_tokens=14)
    replica.step()
    tail = of_kind(replica.events, Admitted)[0].block_ids[-1]
    token_bytes = replica.layout.block_bytes // 2 // 16
    assert replica.plans[0].zeroes == (tail,)
    assert replica.bytes_of(tail)[4 * token_bytes : 16 * token_bytes] == bytes(12 * token_bytes)
    replica.run()
    grown = [block for plan in replica.plans for new in plan.new_blocks for block in new.block_ids]
    assert len(grown) == 1
    assert grown[0] in [block for plan in replica.plans for block in plan.zeroes]
    assert replica.outputs(request_id) == replica.expected(request_id)


@pytest.mark.parametrize("max_inflight", [1, 2, 4])
def test_preemption_takes_the_lowest_priority_and_loses_no_token(max_inflight: int) -> None:
    replica = Replica(num_blocks=8, max_inflight=max_inflight)
    for name, priority in (("urgent", 0), ("patient", 1)):
        request = request_of(name, LONG[: 30 + priority], max_tokens=60, priority=priority)
        replica.requests[request.request_id] = request
        replica.engine.add(request, Mode.LOCAL)
        replica.scheduler._state.history.record(1)  # forecast short, so both are admitted
    replica.run()
    preempted = of_kind(replica.events, Preempted)
    assert {event.request_id for event in preempted} == {RequestId("patient")}
    assert replica.engine.stats().preemptions == len(preempted)
    replica.assert_all_right()
    replica.assert_idle()


def test_admission_waits_for_the_forecast_peak() -> None:
    replica = Replica(num_blocks=16)
    for _ in range(3):
        replica.scheduler._state.history.record(120)
    first = replica.add(LONG[:40], max_tokens=120)
    second = replica.add(LONG[1:41], max_tokens=120)
    replica.step()
    stats = replica.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    replica.run()
    assert replica.engine.stats().preemptions == 0
    assert len(replica.outputs(first)) == len(replica.outputs(second)) == 120


def test_token_rules_end_at_once() -> None:
    replica = Replica()
    only_one = replica.add(LONG, max_tokens=1)
    at_eos = replica.add(LONG, max_tokens=9, logit_bias=((EOS, 100.0),))
    later = replica.add(LONG, max_tokens=9, min_tokens=3, logit_bias=((EOS, 100.0),))
    ignoring = replica.add(LONG, max_tokens=4, ignore_eos=True, logit_bias=((EOS, 100.0),))
    replica.run()
    replica.assert_all_right()
    assert replica.finish_reason(only_one) is FinishReason.LENGTH
    assert replica.outputs(at_eos) == (EOS,)
    assert replica.finish_reason(at_eos) is FinishReason.STOP
    assert len(replica.outputs(later)) == 4
    assert replica.outputs(later)[-1] == EOS
    assert replica.outputs(ignoring) == (EOS,) * 4
    assert replica.finish_reason(ignoring) is FinishReason.LENGTH
    replica.assert_idle()


def test_forced_outputs_are_not_told_again_and_may_have_ended() -> None:
    replica = Replica()
    replica.add(LONG, n=3, max_tokens=6)
    replica.run()
    full = [replica.outputs(RequestId("r0"), index) for index in range(3)]
    outputs = (full[0][:4], full[1], ())
    sampling = replica.requests[RequestId("r0")].sampling
    again = EngineRequest(RequestId("again"), tuple(LONG), sampling, outputs=outputs)
    replica.engine.add(again, Mode.LOCAL)
    replica.run()
    assert replica.outputs(again.request_id, 0) == full[0][4:]
    assert replica.generated(again.request_id, 0)[0].start_index == 4
    (ended,) = replica.generated(again.request_id, 1)
    assert (ended.token_ids, ended.start_index) == ((), 6)
    assert ended.finish_reason is FinishReason.LENGTH
    assert replica.outputs(again.request_id, 2) == full[2]
    over = EngineRequest(RequestId("over"), tuple(LONG), sampling, outputs=tuple(full))
    replica.engine.add(over, Mode.LOCAL)
    assert len(of_kind(replica.step(), Generated)) == 3
    replica.run()
    replica.assert_idle()


def test_a_block_freed_while_a_step_may_write_it_is_reusable_only_afterwards() -> None:
    replica = Replica(num_blocks=4, max_inflight=4)
    request_id = replica.add(LONG[:40], max_tokens=20)
    replica.step()
    replica.step()  # two steps in flight
    replica.engine.abort(request_id)
    request = request_of("d", LONG, max_tokens=4)
    replica.engine.add(request, Mode.RECEIVE, handoff=handoff_of("d"))
    assert not of_kind(replica.step(), Reserved)
    assert replica.engine.stats().blocks_owned == 3
    replica.run()
    assert of_kind(replica.events, Reserved)
    replica.engine.end_reservation(handoff_of("d"), quarantine=False)
    replica.run()
    replica.assert_idle()


def test_refusals_name_what_would_be_right() -> None:
    replica = Replica(num_blocks=4, max_waiting=1)
    with pytest.raises(RequestError, match="at most 64") as too_long:
        replica.add(LONG, max_tokens=15)
    assert (too_long.value.status, too_long.value.code) == (400, "context_length_exceeded")
    replica.requests.clear()
    request_id = replica.add(LONG, max_tokens=14)
    with pytest.raises(RequestError) as full:
        replica.engine.add(request_of("b", LONG, max_tokens=1), Mode.LOCAL)
    assert full.value.status == 429
    with pytest.raises(ValueError, match="here already"):
        replica.engine.add(request_of(request_id, LONG, max_tokens=1), Mode.LOCAL)
    with pytest.raises(ValueError, match="prompt is empty"):
        replica.engine.add(request_of("c", []), Mode.LOCAL)
    with pytest.raises(ValueError, match="2 forced outputs for n = 1"):
        replica.engine.add(request_of("c", LONG, outputs=((1,), (2,))), Mode.LOCAL)
    with pytest.raises(ValueError, match="RECEIVE has one"):
        replica.engine.add(request_of("c", LONG), Mode.RECEIVE)
    replica.run()
    replica.assert_all_right()


def test_waiting_is_in_order_of_priority_then_arrival() -> None:
    replica = Replica(max_slots=1)
    order = [("late", 1), ("first", 0), ("second", 0)]
    for name, priority in order:
        request = request_of(name, LONG[:5], max_tokens=2, priority=priority)
        replica.engine.add(request, Mode.LOCAL)
    replica.run()
    admitted = [event.request_id for event in of_kind(replica.events, Admitted)]
    assert admitted == ["first", "second", "late"]


def test_an_engine_that_cannot_go_on_is_idle_until_something_changes() -> None:
    replica = Replica(num_blocks=4)
    held = replica.add(LONG, Mode.PREFILL)
    blocked = replica.add(LONG[1:], max_tokens=2)
    replica.run()
    assert replica.engine.stats().num_waiting == 1
    assert replica.engine.stats().waiting_prompt_tokens == 49
    replica.engine.release(held)
    assert replica.engine.has_work()
    replica.run()
    assert replica.outputs(blocked) == replica.expected(blocked)
    replica.engine.close()


def test_forced_outputs_wait_for_blocks_that_steps_in_flight_hold_back() -> None:
    replica = Replica(num_blocks=8, max_inflight=2, chunk_tokens=16)
    replica.scheduler._state.history.record(1)
    patient = request_of("patient", list(range(200, 266)), max_tokens=40, priority=1)
    urgent = request_of("urgent", LONG[:16], n=2, max_tokens=24)
    outputs = tuple(
        expected_tokens(urgent.prompt, urgent.sampling, vocab_size=VOCAB, sample_index=index)[:20]
        for index in range(2)
    )
    urgent = request_of("urgent", LONG[:16], n=2, max_tokens=24, outputs=outputs)
    for request in (patient, urgent):
        replica.requests[request.request_id] = request
    replica.engine.add(patient, Mode.LOCAL)
    while len(replica.outputs(patient.request_id)) < 5:
        replica.step()
    replica.engine.add(urgent, Mode.LOCAL)
    replica.run()
    assert of_kind(replica.events, Preempted)[0].request_id == patient.request_id
    replica.assert_all_right()
    replica.assert_idle()


def test_nobody_is_admitted_while_a_running_sequence_lacks_blocks_for_its_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two samples and another request read long forced outputs in a pool that cannot hold all."""
    budgets: list[int | None] = []
    chunks = StepWork.chunks

    def recorded(work: StepWork, sequences: list[Sequence], budget: int) -> int | None:
        budgets.append(chunks(work, sequences, budget))
        return budgets[-1]

    monkeypatch.setattr(StepWork, "chunks", recorded)
    replica = Replica(num_blocks=12, max_inflight=2, chunk_tokens=32)
    replica.scheduler._state.history.record(1)
    for name, start, length, n in (("first", 100, 33, 2), ("second", 200, 50, 1)):
        plain = request_of(name, list(range(start, start + length)), n=n, max_tokens=48)
        outputs = tuple(
            expected_tokens(plain.prompt, plain.sampling, vocab_size=VOCAB, sample_index=index)[:40]
            for index in range(n)
        )
        request = msgspec.structs.replace(plain, outputs=outputs)
        replica.requests[request.request_id] = request
        replica.engine.add(request, Mode.LOCAL)
    num_admitted = 0
    while replica.engine.has_work():
        budgets.clear()
        num_admitted = len(of_kind(replica.events, Admitted))
        replica.step()
        if None in budgets:
            break
    assert None in budgets
    assert len(of_kind(replica.events, Admitted)) == num_admitted
    replica.run()
    replica.assert_all_right()
    replica.assert_idle()


def test_slots_run_out_and_the_rest_of_a_fork_waits_for_them() -> None:
    replica = Replica(max_slots=2)
    replica.add(LONG, n=5, max_tokens=6)
    other = replica.add(LONG[:3], max_tokens=2)
    replica.run()
    replica.assert_all_right()
    assert replica.finish_reason(other) is FinishReason.LENGTH
    replica.assert_idle()


def test_samples_with_long_forced_outputs_catch_up_within_the_budget() -> None:
    replica = Replica(chunk_tokens=16)
    plain = request_of("plain", LONG, n=2, max_tokens=44)
    outputs = tuple(
        expected_tokens(plain.prompt, plain.sampling, vocab_size=VOCAB, sample_index=index)[:40]
        for index in range(2)
    )
    forced = request_of("forced", LONG, n=2, max_tokens=44, outputs=outputs)
    replica.requests[forced.request_id] = forced
    replica.engine.add(forced, Mode.LOCAL)
    replica.run()
    replica.assert_all_right()
    assert replica.engine.stats().block_copies == 1
    replica.assert_idle()


def test_no_chunk_runs_in_a_step_in_which_a_running_sequence_lacks_blocks() -> None:
    replica = Replica(num_blocks=12, max_inflight=2, chunk_tokens=16)
    replica.scheduler._state.history.record(1)
    for name, start, length, priority in (
        ("urgent", 100, 10, 0),
        ("victim", 200, 31, 2),
        ("long", 300, 128, 1),
    ):
        prompt = list(range(start, start + length))
        request = request_of(name, prompt, max_tokens=20, priority=priority)
        replica.requests[request.request_id] = request
        replica.engine.add(request, Mode.LOCAL)
        replica.step()
        replica.step()
    while not of_kind(replica.events, Preempted):
        replica.step()
    (event,) = of_kind(replica.events, Preempted)
    assert event.request_id == RequestId("victim")
    assert replica.scheduler._state.runs[RequestId("long")].sequences[0].is_catching_up()
    replica.run()  # Replica checks the rule at every step
    replica.assert_all_right()


@pytest.mark.parametrize(
    ("prompt", "outputs"), [([1, VOCAB], ()), ([1, 2], ((3, VOCAB + 5),))], ids=["prompt", "forced"]
)
def test_a_token_id_beyond_the_vocabulary_is_refused_and_ends_no_step(
    prompt: list[int], outputs: tuple[tuple[int, ...], ...]
) -> None:
    replica = Replica()
    with pytest.raises(RequestError, match=f"must be below {VOCAB}") as refused:
        replica.engine.add(request_of("r", prompt, outputs=outputs), Mode.LOCAL)
    assert (refused.value.status, refused.value.code) == (400, "invalid_token_id")
    assert replica.engine.stats().num_waiting == 0
