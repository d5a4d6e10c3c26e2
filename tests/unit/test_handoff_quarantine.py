"""Quarantine's rules, one sequence each."""

from __future__ import annotations

from typing import Any

from core.ids import Attempt, Boot, HandoffId, RequestId, WorkerId
from kv_transfer.handoff import quarantine as q

A, B = (HandoffId(RequestId(name), Attempt(1, 1)) for name in "ab")
PEER = Boot("p")


def enter(handoff: HandoffId, generation: int, peer: Boot = PEER) -> q.Enter:
    return q.Enter(handoff, WorkerId("w"), peer, generation)


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
    ward.feed(enter(A, 0))
    assert ward.state.handoffs_of(PEER) == (A,)
    assert ward.state.handoffs_of(Boot("other")) == ()
    ward.now = 2.0
    assert ward.feed(q.Settled(B)) == []
    assert ward.feed(q.Settled(A)) == [q.Free(A, 2.0)]
    assert ward.feed(q.Settled(A)) == []


def test_time_alone_frees_nothing_a_fence_does_after_its_grace() -> None:
    ward = Ward()
    ward.feed(enter(A, 0))
    ward.now = 4.9
    assert ward.tick() == []
    ward.now = 5.0
    assert ward.tick() == [q.StartFence()]
    assert ward.tick() == [], "one fence at a time"
    ward.feed(enter(B, 0))
    ward.feed(q.Fenced(1))
    assert ward.tick() == []
    ward.now += q.GRACE_S
    assert [effect.handoff for effect in ward.tick()] == [A, B]


def test_starving_requests_fence_sooner() -> None:
    ward = Ward()
    ward.feed(enter(A, 0))
    assert ward.tick(starving=True) == []
    ward.now = q.PRESSURE_S
    assert ward.tick(starving=True) == [q.StartFence()]


def test_an_attempt_of_an_older_region_needs_no_second_fence() -> None:
    ward = Ward()
    ward.feed(q.Fenced(1))
    ward.feed(enter(A, 0))
    ward.now = 5.0
    assert ward.tick() == [q.Free(A, 5.0)]


def test_a_newer_attempt_outlives_the_fence_of_older_ones() -> None:
    ward = Ward()
    ward.feed(enter(A, 1))
    ward.feed(q.Fenced(1))
    ward.now = 1.0
    assert ward.tick() == [q.ReleaseSinks()], "A never knew the old address"


def test_sinks_stay_until_everyone_who_knew_them_settled() -> None:
    ward = Ward()
    ward.feed(enter(A, 0))
    ward.feed(enter(B, 0))
    ward.feed(q.Fenced(1))
    assert ward.feed(q.Settled(A)) == [q.Free(A, 0.0)], "B still knows the old address"
    ward.now = 1.0
    assert ward.tick() == [q.Free(B, 1.0)]
    assert ward.feed(q.Settled(B)) == [q.ReleaseSinks()]
    assert ward.feed(q.Settled(B)) == [], "once"


def test_no_sink_goes_while_a_fence_is_under_way() -> None:
    """The region may have moved already and not be registered anew: its newest sink is what peers
    still write to."""
    ward = fenced_ward()
    ward.feed(enter(B, 1))
    ward.now += 5.0
    assert ward.tick() == [q.StartFence()]
    assert ward.feed(q.Settled(A)) == [], "the last who knew the first sink"
    assert ward.tick() == []
    ward.feed(q.Fenced(2))
    assert ward.tick() == [], "B knows the second sink"
    assert ward.feed(q.Settled(B)) == [q.Free(B, 5.0), q.ReleaseSinks()]


def test_the_fabric_is_polled_while_an_attempt_is_held() -> None:
    """A write to a target that does not poll never ends at its writer, who must settle it."""
    ward = Ward()
    assert not ward.state.must_poll(0.0)
    ward.feed(enter(A, 0))
    assert ward.state.must_poll(1000.0)
    ward.feed(q.Settled(A))
    assert not ward.state.must_poll(0.0)


def fenced_ward() -> Ward:
    """A is free by a fence alone: its peer never settled."""
    ward = Ward()
    ward.feed(enter(A, 0))
    ward.feed(q.Fenced(1))
    ward.now = 1.0
    assert ward.tick() == [q.Free(A, 1.0)]
    return ward


def test_after_a_fence_it_is_polled_for_some_time_and_again_when_the_peer_is_heard_of() -> None:
    ward = fenced_ward()
    assert ward.state.must_poll(q.POLL_S)
    ward.now += q.POLL_S
    assert ward.tick() == []
    assert not ward.state.must_poll(ward.now)
    ward.feed(q.PeerHeard(Boot("other")))
    assert not ward.state.must_poll(ward.now)
    ward.feed(q.PeerHeard(PEER))
    assert ward.state.handoffs_of(PEER) == (A,), "it is asked again"
    assert ward.state.must_poll(ward.now)
    assert ward.feed(q.Settled(A)) == [q.ReleaseSinks()]
    assert not ward.state.must_poll(ward.now)


def test_a_peer_that_is_gone_frees_its_sinks_after_what_it_had_buffered_landed() -> None:
    ward = fenced_ward()
    assert ward.state.sink_holders == {("w", PEER)}
    ward.feed(q.PeerGone(Boot("other")))
    ward.feed(q.PeerGone(PEER))
    assert ward.state.sink_holders == set()
    ward.now += q.DRAIN_S - 0.1
    ward.feed(q.PeerGone(PEER))
    assert ward.tick() == []
    assert ward.state.must_poll(ward.now), "buffered bytes are read by polls"
    ward.now += 0.1
    assert ward.tick() == [q.ReleaseSinks()]
    assert not ward.state.must_poll(ward.now)
