"""When silence makes a peer suspect."""

from __future__ import annotations

from control_plane.rpc.peer_watch import PeerWatch


def watch() -> PeerWatch:
    return PeerWatch(heartbeat_s=0.5, suspect_s=2.0, now=0.0)


def test_suspect_after_silence_told_once_and_taken_back_once() -> None:
    peer = watch()
    assert [peer.check(tick * 0.5) for tick in range(1, 7)] == [False] * 4 + [True, False]
    assert peer.is_suspect
    assert peer.heard(3.1)
    assert not peer.is_suspect
    assert not peer.heard(3.2)


def test_heartbeats_keep_a_peer_trusted() -> None:
    peer = watch()
    for tick in range(1, 100):
        peer.heard(tick * 0.5 - 0.1)
        assert not peer.check(tick * 0.5)


def test_our_own_standstill_is_not_the_peers_silence() -> None:
    peer = watch()
    assert not peer.check(0.5)
    assert not peer.check(10.5)  # our loop stood still for 9.5 s
    assert not peer.check(11.0)
    assert not peer.check(11.5)
    assert peer.check(12.0)
