"""The cost model's terms, one at a time."""

from __future__ import annotations

import math

import msgspec
import pytest

from core.ids import Boot, WorkerId
from core.messages import WorkerLoad
from core.worker_record import Role
from router.policy.calibration import Calibration, Factor
from router.policy.cost import (
    Speeds,
    alone_ttft_s,
    decode_terms,
    interference_s,
    pair_ttft_s,
    prefill_terms,
    uncached_tokens,
)
from router.policy.views import PolicySettings, RequestView, WorkerView

SPEEDS = Speeds(
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
    transfer_bytes_per_s=1e6,
    handoff_s=0.005,
    step_growth=0.1,
)
SETTINGS = PolicySettings(chunk_tokens=64, expected_output_tokens=100)


def worker(load: WorkerLoad | None = None, *, requests: int = 0, tokens: int = 0) -> WorkerView:
    return WorkerView(
        worker_id=WorkerId("w"),
        boot=Boot("b"),
        role=Role.DECODE,
        address="host:1",
        layout="layout",
        block_size=16,
        block_bytes=1000,
        max_model_len=4096,
        load=load or WorkerLoad(),
        pending_requests=requests,
        pending_tokens=tokens,
    )


def test_hits_never_cover_the_last_token() -> None:
    assert uncached_tokens(RequestView(64, 1), worker(), 4) == 16
    assert uncached_tokens(RequestView(65, 1), worker(), 4) == 1
    assert uncached_tokens(RequestView(64, 1), worker(), 99) == 16
    assert uncached_tokens(RequestView(5, 1), worker(), 0) == 5


def test_prefill_waits_for_what_is_queued_and_for_what_is_on_its_way() -> None:
    request = RequestView(160, 1)
    idle = prefill_terms(request, worker(), 0, SPEEDS)
    assert idle.ready_s == pytest.approx(0.160)
    load = WorkerLoad(waiting_prompt_tokens=1000, prefill_tokens_per_s=2000.0)
    busy = prefill_terms(request, worker(load, tokens=200), 5, SPEEDS)
    assert busy.compute_s == pytest.approx(80 / 2000)
    assert busy.ready_s == pytest.approx(80 / 2000 + 1200 / 2000)


def test_transfer_is_exposed_only_beyond_the_compute_that_hides_it() -> None:
    """160 tokens are 10 blocks of 1,000 bytes: 10 ms; the last chunk of 64 brings 4 of them."""
    request = RequestView(160, 1)
    decode = decode_terms(request, worker(), 0, SETTINGS, SPEEDS)
    assert (decode.missing_bytes, decode.tail_bytes) == (10_000, 4_000)
    hidden = prefill_terms(request, worker(), 0, SPEEDS)
    assert pair_ttft_s(hidden, decode, SPEEDS) == pytest.approx(0.160 + 0.004 + 0.005 + 0.01)
    slow_fabric = worker(WorkerLoad(transfer_bytes_per_s=1e4))
    exposed = prefill_terms(request, slow_fabric, 0, SPEEDS)
    assert pair_ttft_s(exposed, decode, SPEEDS) == pytest.approx(0.160 + 0.84 + 0.005 + 0.01)


def test_decode_hits_shorten_the_transfer_and_prefill_hits_the_compute() -> None:
    request = RequestView(160, 1)
    cold, warm = (decode_terms(request, worker(), hits, SETTINGS, SPEEDS) for hits in (0, 8))
    assert (warm.missing_bytes, warm.tail_bytes) == (2_000, 2_000)
    prefill = prefill_terms(request, worker(), 0, SPEEDS)
    saved = pair_ttft_s(prefill, cold, SPEEDS) - pair_ttft_s(prefill, warm, SPEEDS)
    assert saved == pytest.approx(0.002)
    warm_prefill = prefill_terms(request, worker(), 8, SPEEDS)
    assert warm_prefill.ready_s == pytest.approx(0.032)


def test_admission_takes_a_step_while_there_are_blocks_and_a_queue_where_not() -> None:
    request = RequestView(160, 1)
    roomy = WorkerLoad(blocks_total=100, blocks_free=4, blocks_cached=6)
    assert decode_terms(request, worker(roomy), 0, SETTINGS, SPEEDS).admission_s == 0.01
    one_ahead = decode_terms(request, worker(roomy, requests=1), 0, SETTINGS, SPEEDS)
    assert one_ahead.admission_s == pytest.approx(0.01 + 2 * 100 * 0.01)
    full = WorkerLoad(blocks_total=100, num_running=10, decode_step_s=0.02)
    assert decode_terms(request, worker(full), 0, SETTINGS, SPEEDS).admission_s == pytest.approx(
        0.02 + 100 * 0.02 / 10
    )
    queued = WorkerLoad(num_waiting=3, num_running=1)
    assert decode_terms(request, worker(queued), 0, SETTINGS, SPEEDS).admission_s == pytest.approx(
        0.01 + 4 * 100 * 0.01
    )


def test_tpot_counts_all_that_will_be_there() -> None:
    request = RequestView(160, 1)
    assert decode_terms(request, worker(), 0, SETTINGS, SPEEDS).tpot_s == pytest.approx(0.01)
    load = WorkerLoad(num_running=11, num_receiving=4, num_waiting=3, decode_step_s=0.04)
    terms = decode_terms(request, worker(load, requests=2), 0, SETTINGS, SPEEDS)
    assert terms.tpot_s == pytest.approx(0.02 * 3.0)  # 0.04 at 11 is 0.02 at 1; 21 will be there


def test_alone_costs_the_others_its_compute() -> None:
    request = RequestView(160, 1)
    load = WorkerLoad(waiting_prompt_tokens=40)
    idle = worker(load)
    terms = decode_terms(request, idle, 5, SETTINGS, SPEEDS)
    assert alone_ttft_s(request, idle, 5, terms, SPEEDS) == pytest.approx(0.04 + 0.08 + 0.01)
    assert interference_s(request, idle, 5, SPEEDS) == 0.0
    assert interference_s(request, worker(WorkerLoad(num_running=1)), 5, SPEEDS) == 0.08


def test_a_factor_learns_the_ratio_and_stays_in_bounds() -> None:
    factor = Factor()
    assert factor.value == 1.0
    for nothing in ((0.0, 1.0), (1.0, 0.0)):
        factor.observe(*nothing)
    assert factor.value == 1.0
    for _ in range(200):
        factor.observe(1.0, 2.0)
    assert factor.value == pytest.approx(2.0)
    for _ in range(200):
        factor.observe(1.0, 1e6)
    assert factor.value == pytest.approx(4.0)
    for _ in range(200):
        factor.observe(1e6, 1.0)
    assert factor.value == pytest.approx(0.25)
    assert math.isfinite(factor.value)


def test_calibration_keeps_handoffs_and_local_prompts_apart() -> None:
    calibration = Calibration()
    calibration.ttft(is_handoff=True).observe(1.0, 3.0)
    assert calibration.ttft(is_handoff=True).value > 1.0
    assert calibration.ttft(is_handoff=False).value == 1.0


def test_preemptions_are_charged_as_requests_that_come_first() -> None:
    request = RequestView(160, 1)
    load = WorkerLoad(num_running=4, blocks_total=100, blocks_free=90, decode_step_s=0.01)

    def admission_s(preemptions: float) -> float:
        view = msgspec.structs.replace(worker(load), recent_preemptions=preemptions)
        return decode_terms(request, view, 0, SETTINGS, SPEEDS).admission_s

    assert admission_s(0.0) == 0.01
    assert admission_s(0.05) == 0.01  # long ago
    # One finishes every 100 steps / 4 sequences; 2 and this one are to be served.
    assert admission_s(2.0) == pytest.approx(0.01 + 3 * 100 * 0.01 / 4)
