"""Scenarios of the scheduler at both ends of a handoff, on an engine with the mock executor."""

from __future__ import annotations

import pytest

from core.ids import RequestId
from engine.events import (
    Admitted,
    CacheChanged,
    Computed,
    Generated,
    Mode,
    Reserved,
)
from tests.engine_requests import LONG, handoff_of, of_kind, request_of
from tests.replica import Replica


def test_prefill_tells_progress_and_first_tokens_and_holds_until_released() -> None:
    replica = Replica(chunk_tokens=32)
    request_id = replica.add(LONG, Mode.PREFILL, n=2, max_tokens=9)
    replica.run()
    assert [event.num_computed for event in of_kind(replica.events, Computed)] == [32, 50]
    block_ids = of_kind(replica.events, Admitted)[0].block_ids
    assert replica.holds_kv(LONG, block_ids, 50)
    for index in range(2):
        assert replica.outputs(request_id, index) == replica.expected(request_id, index)[:1]
    stats = replica.engine.stats()
    assert (stats.num_held, stats.num_running, stats.blocks_owned) == (1, 0, 4)
    replica.engine.abort(request_id)
    replica.run()
    assert replica.engine.stats().blocks_owned == 4
    replica.engine.release(request_id)
    replica.run()
    replica.assert_idle()
    assert replica.engine.stats().blocks_cached == 3


def test_prefill_with_forced_outputs_samples_nothing() -> None:
    replica = Replica()
    request = request_of("p", LONG, outputs=((5,),))
    replica.engine.add(request, Mode.PREFILL)
    replica.run()
    assert not of_kind(replica.events, Generated)
    assert of_kind(replica.events, Computed)[-1].num_computed == 50
    replica.engine.release(request.request_id)
    replica.run()
    replica.assert_idle()


def test_prefill_aborted_in_mid_prompt_keeps_its_blocks_for_the_writes() -> None:
    replica = Replica(chunk_tokens=16)
    waiting = replica.add(LONG[1:], Mode.PREFILL)
    replica.step()
    replica.engine.abort(waiting)
    replica.run()
    assert replica.engine.stats().blocks_owned == 4
    replica.engine.release(waiting)
    never_started = replica.add(LONG, Mode.PREFILL)
    replica.engine.release(never_started)
    replica.run()
    replica.assert_idle()


def test_reservation_joins_and_its_prompt_becomes_matchable_only_then() -> None:
    replica = Replica()
    request = request_of("d", LONG, n=2, max_tokens=5)
    handoff = handoff_of("d")
    replica.requests[request.request_id] = request
    replica.engine.add(request, Mode.RECEIVE, handoff=handoff)
    (reserved,) = of_kind(replica.step(), Reserved)
    assert (len(reserved.block_ids), reserved.num_cached_blocks) == (4, 0)
    assert replica.engine.stats().num_receiving == 1
    replica.run()
    assert not of_kind(replica.events, CacheChanged)
    replica.write_kv(LONG, reserved.block_ids, 0)
    first = [replica.expected(request.request_id, index)[0] for index in range(2)]
    with pytest.raises(ValueError, match="1 first tokens for n = 2"):
        replica.engine.kv_arrived(handoff, first[:1], num_received=50)
    replica.engine.kv_arrived(handoff, first, num_received=50)
    (changed,) = of_kind(replica.step(), CacheChanged)
    assert len(changed.stored) == 3
    replica.run()
    for index in range(2):
        assert (
            replica.outputs(request.request_id, index)
            == (replica.expected(request.request_id, index)[1:])
        )
        assert replica.generated(request.request_id, index)[0].start_index == 1
    stats = replica.engine.stats()
    assert (stats.prompt_tokens_received, stats.prompt_tokens_computed) == (50, 0)
    replica.assert_idle()


def test_an_attempts_name_is_refused_while_blocks_go_by_it() -> None:
    replica = Replica()
    first, second = handoff_of("d"), handoff_of("d", 2)
    replica.engine.add(request_of("d", LONG), Mode.RECEIVE, handoff=first)
    replica.step()
    with pytest.raises(ValueError, match=r"d/1\.1 is here already"):
        replica.engine.add(request_of("e", LONG), Mode.RECEIVE, handoff=first)
    replica.engine.retry(first, second, request_of("d", LONG))
    with pytest.raises(ValueError, match=r"d/1\.1 is here already"):  # quarantined
        replica.engine.add(request_of("e", LONG), Mode.RECEIVE, handoff=first)
    with pytest.raises(ValueError, match=r"d/1\.1 is here already"):
        replica.engine.retry(second, first, request_of("d", LONG))
    replica.engine.end_reservation(second, quarantine=False)
    assert replica.engine.end_quarantine(first) == 4
    replica.engine.add(request_of("e", LONG), Mode.RECEIVE, handoff=first)
    replica.engine.end_reservation(first, quarantine=False)
    replica.run()
    replica.assert_idle()


def test_samples_that_ended_with_their_first_token_do_not_run() -> None:
    replica = Replica()
    request = request_of("d", LONG, n=2, max_tokens=1)
    replica.engine.add(request, Mode.RECEIVE, handoff=handoff_of("d"))
    replica.step()
    replica.engine.kv_arrived(handoff_of("d"), [3, 4], num_received=50)
    replica.run()
    assert not of_kind(replica.events, Generated)
    assert replica.engine.stats().blocks_cached == 3
    replica.assert_idle()


def test_a_request_whose_reusable_blocks_are_all_here_needs_no_handoff() -> None:
    replica = Replica()
    replica.add(LONG, max_tokens=2)
    replica.run()
    request = request_of("d", LONG, max_tokens=4)
    replica.requests[request.request_id] = request
    replica.engine.add(request, Mode.RECEIVE, handoff=handoff_of("d"))
    (admitted,) = of_kind(replica.step(), Admitted)
    assert (admitted.mode, admitted.cached_tokens) == (Mode.LOCAL, 48)
    replica.engine.end_reservation(handoff_of("d"), quarantine=True)  # too late: harmless
    replica.run()
    replica.assert_all_right()
    short = request_of("short", LONG[:16])  # no reusable block at all
    replica.engine.add(short, Mode.RECEIVE, handoff=handoff_of("short"))
    assert of_kind(replica.step(), Reserved)
    replica.engine.end_reservation(handoff_of("short"), quarantine=False)
    replica.run()
    replica.assert_idle()


def test_retry_gets_fresh_blocks_while_the_old_ones_are_quarantined() -> None:
    replica = Replica(num_blocks=10)
    replica.add(LONG[:16], max_tokens=1)
    replica.run()
    request = request_of("d", LONG, max_tokens=3)
    first, second = handoff_of("d"), handoff_of("d", 2)
    replica.engine.add(request, Mode.RECEIVE, handoff=first)
    (before,) = of_kind(replica.step(), Reserved)
    assert before.num_cached_blocks == 1
    replica.engine.retry(first, second, request)
    (after,) = of_kind(replica.step(), Reserved)
    assert after.handoff == second
    assert set(before.block_ids[1:]).isdisjoint(after.block_ids)
    assert replica.engine.stats().blocks_quarantined == 3
    replica.engine.compute_locally(second, request)
    replica.run()
    stats = replica.engine.stats()
    assert (stats.blocks_quarantined, stats.num_waiting) == (6, 0 if replica.events else 1)
    assert replica.engine.end_quarantine(first) == 3
    assert replica.engine.end_quarantine(second) == 3
    assert replica.engine.end_quarantine(second) == 0
    replica.requests[request.request_id] = request
    replica.run()
    replica.assert_all_right()
    replica.assert_idle()


def test_receptions_are_bounded_by_their_share_and_do_not_block_local_prompts() -> None:
    replica = Replica(num_blocks=20)
    for index in range(3):
        prompt = list(range(100 * index, 100 * index + 60))
        name = f"d{index}"
        replica.engine.add(request_of(name, prompt), Mode.RECEIVE, handoff=handoff_of(name))
    local = replica.add(LONG[:5], max_tokens=3)
    replica.run()
    assert replica.engine.stats().num_receiving == 1  # 8 of 20 blocks would exceed 30%
    assert replica.outputs(local) == replica.expected(local)
    replica.engine.abort(RequestId("d2"))
    replica.run()
    assert replica.engine.stats().num_waiting == 1
    for index in range(3):
        replica.engine.end_reservation(handoff_of(f"d{index}"), quarantine=False)
        replica.run()
    replica.assert_idle()


def test_aborting_a_receiving_request_starts_nothing_when_its_kv_arrives() -> None:
    replica = Replica()
    request = request_of("d", LONG, n=2)
    replica.engine.add(request, Mode.RECEIVE, handoff=handoff_of("d"))
    replica.step()
    replica.engine.abort(request.request_id)
    replica.run()
    assert replica.engine.stats().blocks_reserved == 4
    replica.engine.kv_arrived(handoff_of("d"), [1, 2], num_received=50)
    replica.run()
    assert not of_kind(replica.events, Generated)
    replica.assert_idle()


def test_aborting_one_sample_leaves_the_others() -> None:
    replica = Replica()
    before_fork = replica.add(LONG, n=3, max_tokens=6)
    replica.engine.abort(before_fork, 0)
    replica.step()
    replica.step()
    replica.engine.abort(before_fork, 2)
    replica.run()
    assert replica.outputs(before_fork, 0) == ()
    assert replica.outputs(before_fork, 1) == replica.expected(before_fork, 1)
    assert len(replica.outputs(before_fork, 2)) < 6
    replica.engine.abort(before_fork)  # over already: ignored
    replica.run()
    replica.assert_idle()
