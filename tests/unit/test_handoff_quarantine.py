"""Quarantine's rules, one sequence each."""

from __future__ import annotations

from typing import Any

from core.ids import Attempt, Boot, HandoffId, RequestId
from kv_transfer.handoff import quarantine as q

A, B = (HandoffId(RequestId(name), Attempt(1, 1)) for name in "ab")
PEER = Boot("p")


class Ward:
    """A state that keeps what was done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.state = q.Quarantine(quarantine_s=5.0)

    def feed(self, event: q.Event) -> list[Any]:
        self.state, effects = q.advance(self.state, event, self.now)
        return list(effects)

    def tick(self, *, starving: bool = False) -> list[Any]:
        return self.feed(q.Tick(starving=starving))


def test_settled_frees_at_once_and_unknown_changes_nothing() -> None:
    ward = Ward()
    ward.feed(q.Enter(A, PEER, 0))
    assert ward.state.handoffs_of(PEER) == (A,)
    assert ward.state.handoffs_of(Boot("other")) == ()
    ward.now = 2.0
    assert ward.feed(q.Settled(B)) == []
    assert ward.feed(q.Settled(A)) == [q.Free(A, 2.0)]
    assert ward.feed(q.Settled(A)) == []


def test_time_alone_frees_nothing_a_fence_does_after_its_grace() -> None:
    ward = Ward()
    ward.feed(q.Enter(A, PEER, 0))
    ward.now = 4.9
    assert ward.tick() == []
    ward.now = 5.0
    assert ward.tick() == [q.StartFence()]
    assert ward.tick() == [], "one fence at a time"
    ward.feed(q.Enter(B, PEER, 0))
    ward.feed(q.Fenced(1))
    assert ward.tick() == []
    ward.now += q.GRACE_S
    assert [effect.handoff for effect in ward.tick()] == [A, B]


def test_starving_requests_fence_sooner() -> None:
    ward = Ward()
    ward.feed(q.Enter(A, PEER, 0))
    assert ward.tick(starving=True) == []
    ward.now = q.PRESSURE_S
    assert ward.tick(starving=True) == [q.StartFence()]


def test_an_attempt_of_an_older_region_needs_no_second_fence() -> None:
    ward = Ward()
    ward.feed(q.Fenced(1))
    ward.feed(q.Enter(A, PEER, 0))
    ward.now = 5.0
    assert ward.tick() == [q.Free(A, 5.0)]


def test_a_newer_attempt_outlives_the_fence_of_older_ones() -> None:
    ward = Ward()
    ward.feed(q.Enter(A, PEER, 1))
    ward.feed(q.Fenced(1))
    ward.now = 1.0
    assert ward.tick() == []


def test_sinks_stay_until_everyone_who_knew_them_settled() -> None:
    ward = Ward()
    ward.feed(q.Enter(A, PEER, 0))
    ward.feed(q.Enter(B, PEER, 0))
    ward.feed(q.Fenced(1))
    assert ward.feed(q.Settled(A)) == [q.Free(A, 0.0)], "B still knows the old address"
    ward.now = 1.0
    assert ward.tick() == [q.Free(B, 1.0)]
    assert ward.feed(q.Settled(B)) == [q.ReleaseSinks()]
    assert ward.feed(q.Settled(B)) == [], "once"
