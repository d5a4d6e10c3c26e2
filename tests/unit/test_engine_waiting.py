"""What waiting costs and how it is counted: looks at the queue, gauges, forecasts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from core.block_hash import BlockHash
from core.ids import BlockId
from engine.events import Admitted, Mode
from tests.replica import Replica
from tests.unit.test_engine_scheduler import LONG, handoff_of, of_kind, request_of


def test_receptions_that_cannot_start_are_not_matched_step_after_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica(num_blocks=40)
    prefix = list(range(300, 364))
    for index in range(8):
        request = request_of(f"d{index}", [*prefix, index, index + 1], max_tokens=4)
        handoff = handoff_of(request.request_id)
        replica.engine.add(request, Mode.RECEIVE, handoff=handoff)
    replica.run()
    assert replica.engine.stats().num_waiting == 6  # 30% of the pool holds two
    memory = replica.scheduler._state.memory
    match, matched = memory.match, list[int]()

    def counted(hashes: Sequence[BlockHash], num_tokens: int) -> list[BlockId]:
        matched.append(num_tokens)
        return match(hashes, num_tokens)

    monkeypatch.setattr(memory, "match", counted)
    assert replica.scheduler.schedule() is None
    assert len(matched) == 1  # the first in order; the others' kind is closed


def test_a_prompt_that_is_here_already_overtakes_receptions_that_wait() -> None:
    replica = Replica(num_blocks=40)
    replica.add(LONG, max_tokens=1)
    replica.run()
    for index in range(4):
        name = f"d{index}"
        prompt = list(range(100 * index + 200, 100 * index + 260))
        replica.engine.add(request_of(name, prompt), Mode.RECEIVE, handoff=handoff_of(name))
    here = request_of("here", LONG, max_tokens=3)
    replica.requests[here.request_id] = here
    replica.engine.add(here, Mode.RECEIVE, handoff=handoff_of("here"))
    replica.step()
    assert replica.engine.stats().num_waiting == 1
    assert of_kind(replica.events, Admitted)[-1].request_id == here.request_id
    replica.run()
    assert replica.outputs(here.request_id) == replica.expected(here.request_id)


def test_a_sample_that_ended_is_not_waiting_while_its_siblings_go_on() -> None:
    replica = Replica(max_inflight=2)
    request_id = replica.add(LONG, n=2, max_tokens=20)
    while len(replica.outputs(request_id, 1)) < 3:
        replica.step()
    replica.engine.abort(request_id, 1)
    assert replica.scheduler._state.retirement.leaving
    stats = replica.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    replica.run()
    replica.assert_idle()


def test_a_fresh_worker_admits_by_256_tokens_an_answer_or_max_tokens_if_less() -> None:
    replica = Replica(num_blocks=64)  # 1,024 tokens
    for index in range(4):
        replica.add([index] * 16, max_tokens=1000)
    replica.step()
    assert replica.engine.stats().num_running == 3  # 4 * (16 + 256) would be too many
    replica = Replica(num_blocks=64)
    for index in range(20):
        replica.add([index] * 16, max_tokens=16)
    replica.step()
    assert replica.engine.stats().num_running == 20
