"""The decode side's rules, one interleaving each."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import (
    BlockRun,
    FirstTokens,
    HandoffFailed,
    HandoffRefused,
    PrefillCandidate,
    WriteNotification,
)
from core.request import EngineRequest, FinishReason, TokenLogprobs
from core.sampling_params import SamplingParams
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff.block_runs import block_ids_of, block_runs
from kv_transfer.handoff.decode_side import DecodeSide, DecodeTerms, Phase, advance

HERE, P0, P1 = Boot("here"), Boot("p0"), Boot("p1")
FIRST = HandoffId(RequestId("r"), Attempt(1, 1))


class Side:
    """A state that keeps what was done."""

    def __init__(
        self, *, n: int = 1, logprobs: int | None = None, allow_local: bool = True, **terms: Any
    ) -> None:
        candidates = tuple(PrefillCandidate(WorkerId(b), b, "") for b in (P0, P1))
        self.now = 0.0
        usual = DecodeTerms(
            boot=HERE,
            block_size=4,
            candidates=candidates,
            allow_local=allow_local,
            deadline=100.0,
            try_s=10.0,
        )
        self.state = DecodeSide(
            replace(usual, **terms),
            EngineRequest(RequestId("r"), tuple(range(10)), SamplingParams(n=n, logprobs=logprobs)),
            FIRST,
        )

    def feed(self, event: d.Event) -> list[Any]:
        self.state, effects = advance(self.state, event, self.now)
        return list(effects)

    def reserve(self, num_cached: int = 0) -> list[Any]:
        blocks = (BlockId(4), BlockId(5), BlockId(9))
        return self.feed(d.BlocksReserved(self.state.handoff, blocks, num_cached, 3))

    def land(self, first: int, count: int, **fields: Any) -> list[Any]:
        write = WriteNotification(
            self.state.handoff, self.state.candidate.boot, HERE, (0, 0), 3, first, count
        )
        return self.feed(replace(write, **fields))

    def tokens(self, *token_ids: int, ends: tuple[int, ...] = ()) -> list[Any]:
        reasons = tuple(FinishReason.STOP if i in ends else None for i in range(len(token_ids)))
        return self.feed(FirstTokens(self.state.handoff, token_ids, (), reasons, 0, 0.0, 0.0))


def kinds(effects: list[Any]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def test_the_ask_names_the_missing_blocks_in_runs() -> None:
    side = Side()
    (ask,) = side.reserve(num_cached=1)
    assert ask.first_block == 1
    assert ask.blocks == (BlockRun(BlockId(5), 1), BlockRun(BlockId(9), 1))
    assert ask.candidate.boot == P0
    assert ask.remaining_s == 100.0
    assert block_runs((BlockId(4), BlockId(5), BlockId(9))) == (
        BlockRun(BlockId(4), 2),
        BlockRun(BlockId(9), 1),
    )
    assert block_ids_of(ask.blocks) == (5, 9)


def test_it_joins_when_the_union_is_complete_whatever_the_order() -> None:
    side = Side()
    side.reserve(num_cached=1)
    assert side.land(2, 1) == []
    assert kinds(side.tokens(7)) == ["EmitTokens"]
    join, ended = side.land(1, 1)
    assert (join.first_tokens, join.num_received) == ((7,), 6)
    assert ended.outcome is d.AttemptOutcome.COMPLETED
    assert side.feed(d.Aborted()) == [], "an ended handoff ignores everything"


def test_it_waits_for_every_rank_pair() -> None:
    side = Side(rank_pairs=((0, 0), (1, 0)))
    side.reserve()
    side.tokens(7)
    assert side.land(0, 3) == []
    assert side.land(0, 3, rank_pair=(5, 5)) == []
    assert kinds(side.land(0, 3, rank_pair=(1, 0)))[0] == "Join"


@pytest.mark.parametrize(
    ("token_ids", "reasons", "num_logprobs"),
    [((), (), 0), ((7,), (None,), 1), ((7, 8, 9), (None,) * 3, 3), ((7, 8), (None,), 2)],
    ids=["none", "too few", "too many", "a reason less"],
)
def test_first_tokens_of_another_number_than_asked_fail_the_attempt(
    token_ids: tuple[int, ...], reasons: tuple[None, ...], num_logprobs: int
) -> None:
    side = Side(n=2)
    side.reserve()
    side.land(0, 3)
    logprobs = (TokenLogprobs(-1.0),) * num_logprobs
    tokens = FirstTokens(FIRST, token_ids, logprobs, reasons, 0, 0.0, 0.0)
    effects = side.feed(tokens)
    assert kinds(effects) == ["AttemptEnded", "Retry", "Settle"], "nothing is emitted or joined"
    assert effects[0].outcome is d.AttemptOutcome.FAILED
    assert side.state.candidate.boot == P0, "once more"


def test_so_do_logprobs_that_were_asked_for_and_are_missing() -> None:
    side = Side(n=2, logprobs=3)
    side.reserve()
    assert kinds(side.tokens(7, 8))[0] == "AttemptEnded"


def test_first_tokens_may_come_after_the_kv() -> None:
    side = Side()
    side.reserve()
    side.land(0, 3)
    assert kinds(side.tokens(7)) == ["EmitTokens", "Join", "AttemptEnded"]


def test_what_is_not_of_this_attempt_boot_or_generation_changes_nothing() -> None:
    side = Side()
    other = HandoffId(RequestId("r"), Attempt(1, 2))
    assert side.feed(d.BlocksReserved(other, (), 0, 3)) == []
    side.reserve()
    assert side.reserve() == [], "reserved twice"
    before = side.state
    for wrong in (
        {"handoff": other},
        {"source": P1},
        {"target": Boot("an earlier life")},
        {"generation": 2},
    ):
        assert side.land(0, 3, **wrong) == []
    assert side.feed(d.PeerLost(P1, "")) == []
    assert side.feed(d.RegionRevoked(2)) == []
    assert side.state == before


def test_a_refusal_frees_the_blocks_and_asks_the_next() -> None:
    side = Side()
    side.reserve()
    ended, retry = side.feed(HandoffRefused(FIRST, "overloaded", "full"))
    assert ended.outcome is d.AttemptOutcome.REFUSED
    assert retry.untouched
    assert retry.successor.attempt == Attempt(1, 2)
    assert side.state.phase is Phase.QUEUED
    (ask,) = side.reserve()
    assert ask.candidate.boot == P1
    _, local = side.feed(d.AskUndelivered(ask.handoff, "refused"))
    assert isinstance(local, d.ComputeLocally)
    assert local.untouched


@pytest.mark.parametrize("has_landed", [True, False])
def test_who_had_begun_and_refuses_is_not_believed_that_nothing_can_land(
    *, has_landed: bool
) -> None:
    side = Side()
    side.reserve()
    if has_landed:
        side.land(0, 1)
    else:
        side.tokens(5)
    ended, retry, settle = side.feed(HandoffRefused(FIRST, "overloaded", "full"))
    assert ended.outcome is d.AttemptOutcome.REFUSED
    assert not retry.untouched
    assert isinstance(settle, d.Settle)


def test_without_fallback_it_fails_after_the_last_candidate() -> None:
    side = Side(allow_local=False)
    side.reserve()
    side.feed(HandoffRefused(FIRST, "draining", ""))
    side.reserve()
    effects = side.feed(HandoffRefused(side.state.handoff, "draining", ""))
    assert kinds(effects) == ["AttemptEnded", "EndReservation", "Fail"]
    assert effects[-1].retriable


def test_a_failure_is_tried_once_more_then_elsewhere_always_settling() -> None:
    side = Side()
    side.reserve()
    ended, retry, settle = side.feed(HandoffFailed(FIRST, "reset"))
    assert ended.outcome is d.AttemptOutcome.FAILED
    assert (settle.candidate.boot, settle.handoff, settle.generation) == (P0, FIRST, 3)
    assert not retry.untouched
    (ask,) = side.reserve()
    assert ask.candidate.boot == P0
    side.feed(HandoffFailed(side.state.handoff, "reset"))
    (ask,) = side.reserve()
    assert ask.candidate.boot == P1


def test_a_retry_forces_what_was_emitted_and_emits_nothing_again() -> None:
    side = Side(n=2)
    side.reserve()
    side.tokens(7, 8, ends=(1,))
    _, retry, _ = side.feed(d.PeerLost(P0, "gone"))
    assert retry.request.outputs == ((7,), (8,))
    (ask,) = side.reserve()
    assert ask.request.outputs == ((7,), (8,))
    assert side.tokens() == []
    assert side.tokens(1, 2) == [], "a worker that samples forced positions is not believed"
    join, _ = side.land(0, 3)
    assert join.first_tokens == ()


def test_tokens_said_twice_are_emitted_once() -> None:
    side = Side()
    side.reserve()
    side.tokens(7)
    assert side.tokens(7) == []


def test_no_progress_moves_on_and_progress_renews_the_deadline() -> None:
    side = Side()
    side.now = 50.0
    assert side.feed(d.Tick()) == [], "waiting for blocks has the request's deadline alone"
    side.reserve()
    side.now = 59.0
    side.land(0, 1)
    side.now = 60.0
    assert side.feed(d.Tick()) == []
    side.now = 69.0
    ended, _, settle = side.feed(d.Tick())
    assert ended.outcome is d.AttemptOutcome.TIMED_OUT
    assert settle.candidate.boot == P0
    assert side.state.candidate.boot == P1


def test_the_requests_deadline_ends_it() -> None:
    side = Side()
    side.reserve()
    side.now = 100.0
    effects = side.feed(d.Tick())
    assert kinds(effects) == ["AttemptEnded", "EndReservation", "Settle", "Fail"]
    assert not effects[-1].retriable
    waiting = Side()
    waiting.now = 100.0
    assert kinds(waiting.feed(d.Tick())) == ["EndReservation", "Fail"]


def test_an_answered_request_lets_its_kv_arrive_or_gives_it_up_silently() -> None:
    side = Side()
    side.reserve()
    side.tokens(7, ends=(0,))
    assert kinds(side.land(0, 3)) == ["Join", "AttemptEnded"]
    for trouble in (d.PeerLost(P0, ""), d.RegionRevoked(3), HandoffFailed(FIRST, "")):
        side = Side()
        side.reserve()
        side.tokens(7, ends=(0,))
        assert kinds(side.feed(trouble)) == ["AttemptEnded", "EndReservation", "Settle"]
    side = Side()
    side.reserve()
    side.tokens(7, ends=(0,))
    side.now = 100.0
    assert kinds(side.feed(d.Tick())) == ["AttemptEnded", "EndReservation", "Settle"]


def test_aborts() -> None:
    side = Side()
    assert side.feed(d.Aborted()) == [d.EndReservation(FIRST, untouched=True)]
    side = Side()
    side.reserve()
    assert kinds(side.feed(d.Aborted())) == ["AttemptEnded", "EndReservation", "Settle"]
    side = Side(n=2)
    side.reserve()
    assert side.feed(d.SampleAborted(1)) == []
    (emit,) = side.tokens(7, 8)
    assert emit.samples == (0,), "nothing is sent of an aborted sample"
    assert side.feed(d.SampleAborted(0)) == [], "answered: the KV may still arrive"
    assert kinds(side.land(0, 3)) == ["Join", "AttemptEnded"]
    side = Side(n=2)
    side.reserve()
    side.feed(d.SampleAborted(0))
    assert kinds(side.feed(d.SampleAborted(1))) == ["AttemptEnded", "EndReservation", "Settle"]


def test_a_fence_spares_kv_that_has_landed() -> None:
    side = Side()
    assert side.feed(d.RegionRevoked(3)) == [], "without blocks nothing is lost"
    side.reserve()
    side.land(0, 3)
    assert side.feed(d.RegionRevoked(3)) == []
    assert kinds(side.tokens(7)) == ["EmitTokens", "Join", "AttemptEnded"]
    side = Side()
    side.reserve()
    side.land(0, 2)
    _, retry, _ = side.feed(d.RegionRevoked(3))
    assert isinstance(retry, d.Retry)
    assert side.state.candidate.boot == P0, "not the candidate's fault"


def test_all_reusable_blocks_here_means_no_handoff() -> None:
    side = Side()
    assert side.feed(d.FoundLocally()) == []
    assert side.state.phase is Phase.ENDED
