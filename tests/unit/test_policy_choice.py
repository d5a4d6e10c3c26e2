"""Where a request runs: every rule of the choice."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from core.ids import Boot, WorkerId
from core.messages import WorkerLoad
from core.worker_record import Role
from router.policy.choice import Policy
from router.policy.decision import Decision, Reason, Refusal, RefusalReason
from router.policy.views import PolicySettings, RequestView, WorkerView


def worker(name: str, role: Role, **changes: object) -> WorkerView:
    view = WorkerView(
        worker_id=WorkerId(name),
        boot=Boot(f"boot-{name}"),
        role=role,
        address=f"{name}:1",
        layout="layout",
        block_size=16,
        block_bytes=360 * 1024,
        max_model_len=4096,
    )
    return msgspec.structs.replace(view, **changes)


def prefill(number: int, **changes: object) -> WorkerView:
    return worker(f"p{number}", Role.PREFILL, **changes)


def decode(number: int, **changes: object) -> WorkerView:
    return worker(f"d{number}", Role.DECODE, **changes)


def both(number: int, **changes: object) -> WorkerView:
    return worker(f"b{number}", Role.BOTH, **changes)


LONG = RequestView(num_tokens=1000, max_tokens=100)
SHORT = RequestView(num_tokens=20, max_tokens=100)
STRICT = Policy(PolicySettings(is_strict=True))


def decide(
    request: RequestView,
    *workers: WorkerView,
    policy: Policy | None = None,
    hits: dict[str, int] | None = None,
    avoid: frozenset[WorkerId] = frozenset(),
    seed: int = 1,
) -> Decision | Refusal:
    found = {WorkerId(name): blocks for name, blocks in (hits or {}).items()}
    chosen_policy = policy or Policy(PolicySettings())
    return chosen_policy.decide(request, workers, found, random.Random(seed), avoid=avoid)


def decision(request: RequestView, *workers: WorkerView, **options: object) -> Decision:
    outcome = decide(request, *workers, **options)  # pyright: ignore[reportArgumentType] - a relay
    assert isinstance(outcome, Decision)
    return outcome


def names(chosen: Decision) -> list[str]:
    return [str(candidate.worker_id) for candidate in chosen.candidates]


def test_a_long_prompt_goes_through_a_prefill_worker() -> None:
    chosen = decision(LONG, prefill(0), decode(0))
    assert chosen.reason is Reason.DISAGGREGATED
    assert chosen.worker_id == "d0"
    assert names(chosen) == ["p0"]
    assert chosen.candidates[0].boot == "boot-p0"
    assert chosen.candidates[0].address == "p0:1"
    assert chosen.allow_local
    assert chosen.prefill_tokens == 1000
    assert chosen.predicted_ttft_s == chosen.raw_ttft_s > 1000 / 1000
    assert chosen.predicted_tpot_s == chosen.raw_tpot_s > 0


def test_predictions_are_calibrated_and_raw_ones_are_kept() -> None:
    policy = Policy(PolicySettings())
    for _ in range(200):
        policy.calibration.ttft(is_handoff=True).observe(1.0, 2.0)
        policy.calibration.tpot.observe(1.0, 3.0)
    chosen = decision(LONG, prefill(0), decode(0), policy=policy)
    assert chosen.predicted_ttft_s == pytest.approx(2 * chosen.raw_ttft_s)
    assert chosen.predicted_tpot_s == pytest.approx(3 * chosen.raw_tpot_s)


def test_the_queue_decides_between_prefill_workers_and_candidates_are_ordered() -> None:
    busy = prefill(0, load=WorkerLoad(waiting_prompt_tokens=5000))
    busier = prefill(1, load=WorkerLoad(waiting_prompt_tokens=9000))
    chosen = decision(LONG, busier, busy, prefill(2), decode(0))
    assert names(chosen) == ["p2", "p0", "p1"]
    few = Policy(PolicySettings(max_candidates=2))
    assert names(decision(LONG, busier, busy, prefill(2), decode(0), policy=few)) == ["p2", "p0"]


def test_work_on_its_way_counts_like_a_queue() -> None:
    sent = prefill(0, pending_tokens=5000, pending_requests=5)
    assert names(decision(LONG, sent, prefill(1), decode(0)))[0] == "p1"


def test_a_prefill_workers_hits_attract() -> None:
    for seed in range(10):
        chosen = decision(LONG, prefill(0), prefill(1), decode(0), hits={"p1": 50}, seed=seed)
        assert names(chosen) == ["p1", "p0"]
        assert chosen.prefill_tokens == 200


def test_running_sequences_repel_from_a_decode_worker() -> None:
    busy = decode(0, load=WorkerLoad(num_running=40))
    for seed in range(10):
        assert decision(LONG, prefill(0), busy, decode(1), seed=seed).worker_id == "d1"


def test_equals_are_chosen_at_random_and_the_less_busy_of_two_wins() -> None:
    equals = [prefill(number) for number in range(3)] + [decode(0), decode(1)]
    counts = Counter(names(decision(LONG, *equals, seed=seed))[0] for seed in range(90))
    assert min(counts.values()) > 10
    # within 5%: one more running sequence costs less than that, yet the other is preferred
    policy = Policy(PolicySettings(near_best=0.2))
    slightly = decode(0, load=WorkerLoad(num_running=1))
    counts = Counter(
        decision(LONG, prefill(0), slightly, decode(1), policy=policy, seed=seed).worker_id
        for seed in range(200)
    )
    assert 0.6 < counts[WorkerId("d1")] / 200 < 0.9  # 3 of 4 draws of two see the idle one


def test_a_worker_that_has_measured_nothing_yet_is_as_good_as_its_fastest_peer() -> None:
    """Else it would get nothing while the others are idle, and never be measured."""
    fast = WorkerLoad(prefill_tokens_per_s=20_000.0, decode_step_s=0.004, transfer_bytes_per_s=2e10)
    workers = [prefill(0, load=fast), prefill(1), decode(0, load=fast), decode(1)]
    pairs = Counter(
        (names(chosen)[0], chosen.worker_id)
        for chosen in (decision(LONG, *workers, seed=seed) for seed in range(80))
    )
    assert len(pairs) == 4
    assert min(pairs.values()) > 8
    # a peer's step is slow because its batch is large, not because the machine is
    busy = decode(0, load=WorkerLoad(num_running=32, decode_step_s=0.05))
    assert decision(LONG, prefill(0), busy, decode(1)).predicted_tpot_s < 0.02


def test_a_short_prompt_is_computed_on_the_decode_worker_when_that_is_cheaper() -> None:
    chosen = decision(SHORT, prefill(0), decode(0))
    assert chosen.reason is Reason.LOCAL
    assert chosen.candidates == ()
    assert chosen.allow_local
    assert chosen.prefill_tokens == 20
    slow = decode(0, load=WorkerLoad(num_running=1, waiting_prompt_tokens=2000))
    assert decision(SHORT, prefill(0), slow).reason is Reason.DISAGGREGATED


def test_a_mostly_cached_prompt_is_computed_on_the_decode_worker() -> None:
    request = RequestView(num_tokens=1000, max_tokens=100)
    assert decision(request, prefill(0), decode(0), hits={"d0": 57}).reason is Reason.LOCAL
    assert decision(request, prefill(0), decode(0), hits={"d0": 50}).reason is Reason.DISAGGREGATED
    # nine tenths of a very long prompt leave more than one step's budget
    long = RequestView(num_tokens=10_000, max_tokens=1)
    wide = {"max_model_len": 20_000}
    outcome = decision(long, prefill(0, **wide), decode(0, **wide), hits={"d0": 575})
    assert outcome.reason is Reason.DISAGGREGATED


def test_when_decode_holds_all_candidates_go_along_in_case_it_does_not() -> None:
    chosen = decision(RequestView(64, 10), prefill(0), prefill(1), decode(0), hits={"d0": 4})
    assert chosen.reason is Reason.LOCAL_HIT
    assert sorted(names(chosen)) == ["p0", "p1"]
    assert chosen.allow_local
    strict = decision(RequestView(64, 10), prefill(0), decode(0), hits={"d0": 3}, policy=STRICT)
    assert (strict.reason, strict.allow_local) == (Reason.LOCAL_HIT, False)


def test_without_a_prefill_worker_decode_computes_unless_strict() -> None:
    chosen = decision(LONG, decode(0))
    assert (chosen.reason, chosen.allow_local) == (Reason.FALLBACK, True)
    assert chosen.candidates == ()
    assert decide(LONG, decode(0), policy=STRICT) == Refusal(RefusalReason.NO_PREFILL_WORKER)


def test_strict_never_prefills_on_decode_by_choice() -> None:
    chosen = decision(SHORT, prefill(0), decode(0), policy=STRICT)
    assert (chosen.reason, chosen.allow_local) == (Reason.DISAGGREGATED, False)


def test_the_header_forces_either_way() -> None:
    always = msgspec.structs.replace(SHORT, disaggregate=True)
    chosen = decision(always, prefill(0), decode(0), both(0), hits={"d0": 1})
    assert (chosen.reason, chosen.allow_local, names(chosen)) == (Reason.ALWAYS, False, ["p0"])
    assert decide(always, decode(0), both(0)) == Refusal(RefusalReason.NO_PREFILL_WORKER)
    never = msgspec.structs.replace(LONG, disaggregate=False)
    chosen = decision(never, prefill(0), decode(0))
    assert (chosen.reason, chosen.allow_local, names(chosen)) == (Reason.NEVER, True, [])
    assert decision(never, both(0)).reason is Reason.COLOCATED


def test_a_worker_of_role_both_serves_alone() -> None:
    chosen = decision(LONG, both(0))
    assert (chosen.reason, chosen.worker_id, names(chosen)) == (Reason.COLOCATED, "b0", [])
    assert decision(LONG, both(0), policy=STRICT).reason is Reason.COLOCATED
    busy = both(0, load=WorkerLoad(waiting_prompt_tokens=9000))
    assert decision(LONG, busy, prefill(0), decode(0)).reason is Reason.DISAGGREGATED


def test_suspects_are_avoided_while_there_is_another_way() -> None:
    frozen = decode(0, is_suspect=True)
    loaded = decode(1, load=WorkerLoad(num_running=60))
    assert decision(LONG, prefill(0), frozen, loaded).worker_id == "d1"
    assert decision(LONG, prefill(0), frozen).worker_id == "d0"
    asleep = prefill(0, is_suspect=True)
    assert names(decision(LONG, asleep, prefill(1), decode(0))) == ["p1"]
    assert decision(LONG, asleep, decode(0)).reason is Reason.FALLBACK
    assert names(decision(LONG, asleep, decode(0), policy=STRICT)) == ["p0"]


def test_layouts_must_be_equal_for_a_handoff() -> None:
    other = prefill(1, layout="other")
    assert names(decision(LONG, prefill(0), other, decode(0))) == ["p0"]
    assert decision(LONG, other, decode(0)).reason is Reason.FALLBACK


NO_PATH = WorkerLoad(path_failure="no KV moves", is_unpaired=True)


def test_who_has_no_path_for_kv_is_paired_with_nobody() -> None:
    chosen = decision(LONG, prefill(0, load=NO_PATH), prefill(1), decode(0))
    assert (chosen.reason, names(chosen)) == (Reason.DISAGGREGATED, ["p1"])
    alone = decision(LONG, prefill(0, load=NO_PATH), decode(0))
    assert (alone.reason, names(alone)) == (Reason.FALLBACK, [])
    alone = decision(LONG, prefill(0), decode(0, load=NO_PATH))
    assert (alone.reason, names(alone)) == (Reason.FALLBACK, [])
    strict = decide(LONG, prefill(0), decode(0, load=NO_PATH), policy=STRICT)
    assert strict == Refusal(RefusalReason.NO_PREFILL_WORKER)
    strict = decision(LONG, prefill(0), decode(0, load=NO_PATH), decode(1), policy=STRICT)
    assert strict.worker_id == "d1"
    hit = decision(LONG, prefill(0), decode(0, load=NO_PATH), hits={"d0": 62})
    assert (hit.reason, names(hit)) == (Reason.LOCAL_HIT, [])


def test_a_worker_on_trial_is_paired_again() -> None:
    trial = WorkerLoad(path_failure="no KV moves")
    chosen = decision(LONG, prefill(0, load=trial), decode(0))
    assert (chosen.reason, names(chosen)) == (Reason.DISAGGREGATED, ["p0"])


def test_who_cannot_hold_it_is_not_chosen() -> None:
    small_pool = decode(0, load=WorkerLoad(blocks_total=62, blocks_free=62))
    assert decide(LONG, prefill(0), small_pool) == Refusal(RefusalReason.TOO_LONG)
    short_context = decode(0, max_model_len=1000)
    assert decide(LONG, prefill(0), short_context) == Refusal(RefusalReason.TOO_LONG)
    resumed = msgspec.structs.replace(LONG, num_forced=100)
    assert decide(resumed, decode(0, max_model_len=1100)) == Refusal(RefusalReason.TOO_LONG)
    assert decision(LONG, prefill(0), small_pool, decode(1)).worker_id == "d1"
    small_prefill = prefill(0, max_model_len=500)
    assert decision(LONG, small_prefill, decode(0)).reason is Reason.FALLBACK


def test_who_cannot_hold_the_answer_is_not_chosen() -> None:
    """A worker refuses a prompt and an answer that together exceed its context, for good."""
    exact, less = decode(0, max_model_len=1100), decode(1, max_model_len=1099)
    assert decide(LONG, prefill(0), less) == Refusal(RefusalReason.TOO_LONG)
    for seed in range(10):
        assert decision(LONG, prefill(0), exact, less, seed=seed).worker_id == "d0"
    resumed = RequestView(num_tokens=1000, max_tokens=40, num_forced=60)
    assert decision(resumed, prefill(0), exact, less).worker_id == "d0"
    for_one_token = prefill(0, max_model_len=1001)
    assert names(decision(LONG, for_one_token, decode(0))) == ["p0"]


def test_nobody_and_everybody_avoided_are_told_apart() -> None:
    assert decide(LONG, prefill(0)) == Refusal(RefusalReason.NO_WORKER)
    avoid = frozenset({WorkerId("d0")})
    assert decide(LONG, prefill(0), decode(0), avoid=avoid) == Refusal(RefusalReason.AVOIDED)
    assert decision(LONG, prefill(0), decode(0), decode(1), avoid=avoid).worker_id == "d1"


def test_a_full_hit_with_nobody_to_ask_is_computed_in_strict_mode_too() -> None:
    alone = decision(LONG, decode(0), policy=STRICT, hits={"d0": 62})
    assert (alone.reason, alone.candidates, alone.allow_local) == (Reason.LOCAL_HIT, (), True)
    asked = decision(LONG, decode(0), prefill(0), policy=STRICT, hits={"d0": 62})
    assert (asked.reason, names(asked), asked.allow_local) == (Reason.LOCAL_HIT, ["p0"], False)


def test_a_worker_that_preempts_repels_although_it_shows_free_blocks() -> None:
    load = WorkerLoad(num_running=4, blocks_total=1000, blocks_free=900)
    preempting = decode(0, load=load, recent_preemptions=1.0)
    calm = decode(1, load=load)
    for seed in range(10):
        assert decision(LONG, prefill(0), preempting, calm, seed=seed).worker_id == "d1"
