"""The prefill side's rules, one interleaving each."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import BlockRun, PrefillAsk, RegionDescriptor
from core.request import EngineRequest, FinishReason, TokenLogprobs
from core.sampling_params import SamplingParams
from kv_transfer.handoff import prefill_messages as p
from kv_transfer.handoff.agent_renewal import is_renewal_due
from kv_transfer.handoff.prefill_side import PrefillSide, PrefillTerms, Stage, advance, receive
from kv_transfer.handoff.tombstones import KEEP_S, Tombstones

HANDOFF = HandoffId(RequestId("r"), Attempt(1, 1))
TERMS = PrefillTerms(layout="L", block_size=4, block_bytes=8, try_s=10.0)
SOURCES = tuple(BlockId(i) for i in (30, 31, 32))


def ask_of(*, n: int = 1, first_block: int = 0, outputs: Any = (), **region: Any) -> PrefillAsk:
    usual = RegionDescriptor(WorkerId("d"), Boot("d"), 0, 0, 80, 8, "L", b"")
    descriptor = replace(usual, **region)
    request = EngineRequest(RequestId("r"), tuple(range(10)), SamplingParams(n=n), outputs)
    blocks = (BlockRun(BlockId(5), 3 - first_block),)
    return PrefillAsk(HANDOFF, request, first_block, blocks, descriptor, 50.0)


class Side:
    """A state that keeps what was done."""

    def __init__(self, ask: PrefillAsk | None = None) -> None:
        self.now = 1.0
        side, effects = receive(ask or ask_of(), TERMS, self.now, is_settled=False)
        assert side is not None
        assert kinds(effects) == ["Compute"]
        self.state: PrefillSide = side

    def feed(self, event: p.Event) -> list[Any]:
        self.state, effects = advance(self.state, event, self.now)
        return list(effects)

    def admit(self, cached_tokens: int = 0) -> list[Any]:
        return self.feed(p.PromptAdmitted(SOURCES, cached_tokens))

    def finish(self, num_writes: int) -> list[Any]:
        return [e for i in range(num_writes) for e in self.feed(p.WriteDone(i))]


def kinds(effects: Any) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def told(effects: list[Any]) -> list[str]:
    return [type(e.message).__name__ for e in effects if isinstance(e, p.Tell)]


TOKEN = p.TokenSampled(0, 77, (TokenLogprobs(-0.5),), FinishReason.STOP)


def test_blocks_are_pushed_as_they_are_finished_and_the_tail_at_the_end() -> None:
    side = Side()
    assert side.admit() == []
    (push,) = side.feed(p.ChunkComputed(9))
    assert (push.first_block, push.sources, push.targets) == (0, (30, 31), (5, 6))
    (tail,) = side.feed(p.ChunkComputed(10))
    assert (tail.first_block, tail.sources, tail.targets) == (2, (32,), (7,))
    side.now = 3.0
    (tell,) = side.feed(TOKEN)
    tokens = tell.message
    assert (tokens.token_ids, tokens.finish_reasons) == ((77,), (FinishReason.STOP,))
    assert tokens.logprobs == (TokenLogprobs(-0.5),)
    assert side.feed(p.WriteDone(1)) == []
    assert side.finish(1) == [
        p.Release(),
        p.Forget(HANDOFF, may_land=False, outcome=p.AttemptOutcome.COMPLETED),
    ]
    assert side.feed(p.Tick()) == [], "what is over ignores everything"


def test_nothing_is_pushed_that_decode_holds_and_hits_are_pushed_at_once() -> None:
    side = Side(ask_of(first_block=1))
    (push,) = side.admit(cached_tokens=8)
    assert (push.first_block, push.sources, push.targets) == (1, (31,), (5,))
    (tail,) = side.feed(p.ChunkComputed(10))
    assert (tail.sources, tail.targets) == ((32,), (6,))


def test_first_tokens_wait_for_the_prompt_and_for_every_sample() -> None:
    side = Side(ask_of(n=2))
    side.admit()
    assert side.feed(replace(TOKEN, sample_index=1, token_id=8)) == []
    assert told(side.feed(p.ChunkComputed(10))) == []
    (tell,) = side.feed(TOKEN)
    assert tell.message.token_ids == (77, 8)


def test_forced_outputs_are_not_sampled() -> None:
    side = Side(ask_of(outputs=((5,),)))
    side.admit()
    push, tell = side.feed(p.ChunkComputed(10))
    assert len(push.sources) == 3
    assert tell.message.token_ids == ()


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"layout": "M"}, "layout", "L here, M there"),
        ({"block_bytes": 16}, "layout", "block_bytes: 8 here, 16 there"),
        ({"num_bytes": 56}, "layout", "outside"),
        ({"first_block": 1, "cut": True}, "layout", "blocks of the prompt: 3 here, 4 there"),
    ],
)
def test_refusals_name_the_difference(change: dict[str, Any], reason: str, words: str) -> None:
    is_cut = change.pop("cut", False)
    ask = ask_of(**change)
    if is_cut:
        ask = replace(ask, first_block=2)
    side, effects = receive(ask, TERMS, 0.0, is_settled=False)
    assert side is None
    tell, forget = effects
    assert isinstance(tell, p.Tell)
    assert getattr(tell.message, "reason") == reason  # noqa: B009 - one of four messages
    assert words in getattr(tell.message, "message")  # noqa: B009
    assert isinstance(forget, p.Forget)
    assert forget.outcome is p.AttemptOutcome.REFUSED


def test_a_settled_or_draining_worker_refuses() -> None:
    for terms, is_settled, reason in (
        (TERMS, True, "settled"),
        (replace(TERMS, refusing="draining"), False, "draining"),
    ):
        side, effects = receive(ask_of(), terms, 0.0, is_settled=is_settled)
        assert side is None
        assert reason in str(effects[0])


def test_the_engine_may_refuse() -> None:
    side = Side()
    effects = side.feed(p.EngineRefused("overloaded", "full"))
    assert told(effects) == ["HandoffRefused"]
    assert side.state.stage is Stage.OVER


def test_a_settle_is_answered_when_every_write_is_done() -> None:
    side = Side()
    side.admit()
    side.feed(p.ChunkComputed(8))
    assert kinds(side.feed(p.SettleRequested())) == ["StopComputing"]
    assert side.feed(p.ChunkComputed(10)) == [], "it happened before the engine heard"
    assert side.feed(p.SettleRequested()) == [], "idempotent"
    effects = side.finish(1)
    assert kinds(effects) == ["Release", "Tell", "Forget"]
    assert told(effects) == ["HandoffSettled"]


def test_a_settle_of_a_queued_prompt_is_answered_at_once() -> None:
    effects = Side().feed(p.SettleRequested())
    assert kinds(effects) == ["StopComputing", "Release", "Tell", "Forget"]


def test_a_lost_stream_settles_with_nobody_to_tell() -> None:
    side = Side()
    side.admit()
    side.feed(p.ChunkComputed(8))
    assert kinds(side.feed(p.DecodeLost())) == ["StopComputing"]
    assert kinds(side.finish(1)) == ["Release", "Forget"]
    side = Side()
    side.admit()
    side.feed(p.ChunkComputed(10))
    side.feed(TOKEN)
    assert side.feed(p.DecodeLost()) == []
    assert kinds(side.finish(1)) == ["Release", "Forget"]


def test_a_failed_write_holds_the_blocks_and_never_settles() -> None:
    side = Side()
    side.admit()
    side.feed(p.ChunkComputed(4))
    side.feed(p.ChunkComputed(8))
    effects = side.feed(p.WriteFailed(0, "reset"))
    assert told(effects) == ["HandoffFailed"]
    assert kinds(effects)[1:] == ["StopComputing"]
    assert side.feed(p.WriteFailed(1, "reset")) == [], "said once"
    assert side.feed(p.SettleRequested()) == []
    assert side.feed(p.AgentDestroyed(before=1)) == [], "write 1 was another agent's"
    assert side.feed(p.AgentDestroyed(before=2)) == [
        p.Release(),
        p.Forget(HANDOFF, may_land=True, outcome=p.AttemptOutcome.FAILED),
    ]


def test_a_refused_write_stops_it_and_holds_nothing() -> None:
    """Its blocks go when the other writes are done, and a settle is answered then."""
    side = Side()
    side.admit()
    side.feed(p.ChunkComputed(4))
    side.feed(p.ChunkComputed(8))
    effects = side.feed(p.WriteRefused(1, "unknown peer"))
    assert told(effects) == ["HandoffFailed"]
    assert kinds(effects)[1:] == ["StopComputing"]
    assert side.feed(p.SettleRequested()) == []
    effects = side.feed(p.WriteDone(0))
    assert told(effects) == ["HandoffSettled"]
    assert effects[-1] == p.Forget(HANDOFF, may_land=False, outcome=p.AttemptOutcome.FAILED)


def test_writes_refused_one_after_another_are_told_once() -> None:
    side = Side()
    side.admit()
    side.feed(p.ChunkComputed(4))
    side.feed(p.ChunkComputed(8))
    assert told(side.feed(p.WriteRefused(0, "unknown peer"))) == ["HandoffFailed"]
    assert kinds(side.feed(p.WriteRefused(1, "unknown peer"))) == ["Release", "Forget"]


def test_an_agent_that_goes_fails_the_writes_it_had() -> None:
    side = Side()
    side.admit()
    assert side.feed(p.AgentDestroyed(before=0)) == [], "it had none of this attempt's"
    side.feed(p.ChunkComputed(8))
    effects = side.feed(p.AgentDestroyed(before=1))
    assert told(effects) == ["HandoffFailed"]
    assert kinds(effects)[-2:] == ["Release", "Forget"]


def test_the_deadline_stops_it() -> None:
    side = Side()
    side.admit()
    assert side.feed(p.Tick()) == []
    side.now = 50.0
    side.feed(p.ChunkComputed(4))
    side.now = 51.0
    effects = side.feed(p.Tick())
    assert told(effects) == ["HandoffFailed"]
    assert side.feed(p.Tick()) == []
    *_, forget = side.finish(1)
    assert forget.outcome is p.AttemptOutcome.TIMED_OUT


def test_writes_that_make_no_progress_stop_it_and_are_stuck() -> None:
    """Their target may be frozen; such writes stay pending for ever."""
    side = Side()
    side.admit()
    side.feed(p.ChunkComputed(4))
    side.now = 10.0
    side.feed(p.ChunkComputed(8))
    side.feed(p.WriteDone(0))
    side.feed(p.ChunkComputed(10))
    side.feed(TOKEN)
    side.now = 19.9
    assert side.feed(p.Tick()) == [], "a write has ended since"
    side.now = 20.0
    assert told(side.feed(p.Tick())) == ["HandoffFailed"]
    assert not is_renewal_due([side.state], 24.9, 5.0)
    assert is_renewal_due([side.state], 25.0, 5.0)
    side.feed(p.SettleRequested())
    effects = [*side.feed(p.WriteDone(1)), *side.feed(p.WriteDone(2))]
    assert told(effects) == ["HandoffSettled"], "the peer was slow, not gone"


def test_a_pause_between_writes_is_not_a_lack_of_progress() -> None:
    side = Side()
    side.admit()
    side.feed(p.ChunkComputed(4))
    side.feed(p.WriteDone(0))
    side.now = 40.0
    assert side.feed(p.Tick()) == []
    side.feed(p.ChunkComputed(8))
    side.now = 49.0
    assert side.feed(p.Tick()) == []


def test_the_agent_is_renewed_for_stuck_blocks_and_waits_for_healthy_writes() -> None:
    stuck, healthy, idle = Side(), Side(), Side()
    for side in (stuck, healthy):
        side.admit()
        side.feed(p.ChunkComputed(8))
    assert not is_renewal_due([healthy.state, idle.state], 100.0, 5.0)
    stuck.feed(p.DecodeLost())
    assert not is_renewal_due([stuck.state], 5.9, 5.0)
    assert is_renewal_due([stuck.state, idle.state], 6.0, 5.0)
    assert not is_renewal_due([stuck.state, healthy.state], 10.9, 5.0)
    assert is_renewal_due([healthy.state, stuck.state], 11.0, 5.0)
    stuck.finish(1)
    assert not is_renewal_due([stuck.state], 100.0, 5.0), "its writes ended by themselves"


def test_tombstones_expire_and_remember_what_may_land() -> None:
    stones = Tombstones()
    stones.place(HANDOFF, 0.0, may_land=True)
    stones.place(HANDOFF, 5.0, may_land=False)
    other = HandoffId(RequestId("s"), Attempt(1, 1))
    stones.place(other, 10.0, may_land=False)
    assert stones.may_land(HANDOFF)
    assert not stones.may_land(other)
    stones.expire(KEEP_S)
    assert HANDOFF not in stones
    assert not stones.may_land(HANDOFF)
    assert other in stones
    assert len(stones) == 1
