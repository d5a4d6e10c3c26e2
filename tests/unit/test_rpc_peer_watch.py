"""When silence makes a peer suspect."""

from __future__ import annotations

import pytest

from control_plane.rpc.peer_watch import PeerWatch


def watch() -> PeerWatch:
    return PeerWatch(heartbeat_s=0.5, suspect_s=2.0, now=0.0)


def suspected_at(peer: PeerWatch) -> float:
    """Look when it asks for it, until it is suspect."""
    while not peer.check(looked_at := peer.look_at):
        continue
    return looked_at


def test_suspect_after_silence_told_once_and_taken_back_once() -> None:
    peer = watch()
    looks = [(peer.look_at, peer.check(peer.look_at)) for _ in range(4)]
    assert looks == [(2.0, False), (2.5, True), (4.5, False), (6.5, False)]
    assert peer.is_suspect
    assert peer.heard(7.0)
    assert not peer.is_suspect
    assert not peer.heard(7.1)


def test_a_peer_that_talks_costs_one_look_in_suspect_s() -> None:
    peer, num_looks = watch(), 0
    for tick in range(1, 101):
        now = float(tick)
        while peer.look_at <= now:
            assert not peer.check(peer.look_at)
            num_looks += 1
        peer.heard(now)
    assert num_looks <= 100


@pytest.mark.parametrize("heard_at", [0.0, 0.3, 1.0, 1.9, 2.2])
def test_silence_is_seen_in_time_whenever_it_began(heard_at: float) -> None:
    peer = watch()
    while peer.look_at < heard_at:
        peer.check(peer.look_at)
    peer.heard(heard_at)
    assert heard_at + 2.0 <= suspected_at(peer) <= heard_at + 2.5


def test_silence_after_a_suspicion_is_seen_in_time_too() -> None:
    peer = watch()
    assert suspected_at(peer) == 2.5
    peer.heard(3.0)
    assert 5.0 <= suspected_at(peer) <= 5.5


def test_our_own_standstill_is_not_the_peers_silence() -> None:
    peer = watch()
    assert not peer.check(11.5)  # our loop stood still for 9.5 s
    assert peer.look_at == 12.0, "time to read what came meanwhile"
    assert peer.check(12.0)


def test_a_standstill_does_not_excuse_later_silence() -> None:
    peer = watch()
    peer.heard(11.5)  # read first, when our loop went on
    assert not peer.check(11.5)
    assert peer.look_at == 13.5
    assert not peer.check(13.5)
    assert peer.check(14.0)
