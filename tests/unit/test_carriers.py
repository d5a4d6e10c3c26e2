"""What carries a peer's bytes, told from the sockets' traffic around a transfer."""

from __future__ import annotations

import socket

import pytest

from kv_transfer.nixl.carriers import Carriers
from kv_transfer.nixl.tcp_traffic import Carried, busiest_since, tcp_traffic
from kv_transfer.transport import PeerName

NEAR, FAR = PeerName("near@1"), PeerName("far@1")
SMALL, LARGE = 4096, 1 << 20


class Observed:
    """Carriers on sockets that carry what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.carriers = Carriers()
        self.busiest = Carried()
        module = "kv_transfer.nixl.carriers"
        monkeypatch.setattr(f"{module}.tcp_traffic", dict[str, Carried])
        monkeypatch.setattr(f"{module}.busiest_since", lambda _: self.busiest)
        monkeypatch.setattr(f"{module}._HAS_RDMA", False)

    def transfer(
        self, peer: PeerName, size: int, carried: Carried, *, is_read: bool = False
    ) -> list[str]:
        """Let one transfer begin and end alone; return what is known then."""
        self.busiest = carried
        sample = self.carriers.begin(peer, size, is_read=is_read, busy=[peer])
        if sample is not None:
            self.carriers.end(sample, is_done=True)
        return self.carriers.seen


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Observed:
    return Observed(monkeypatch)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_few_bytes_prove_cma_at_once(observed: Observed, size: int) -> None:
    assert observed.transfer(NEAR, size, Carried(sent=227)) == ["cma"]


def test_many_bytes_of_a_large_transfer_tell_tcp_at_once(observed: Observed) -> None:
    assert observed.transfer(FAR, LARGE, Carried(sent=LARGE // 4)) == ["tcp"], "one of four lanes"


def test_small_transfers_tell_tcp_by_two(observed: Observed) -> None:
    assert observed.transfer(FAR, SMALL, Carried(sent=SMALL)) == [], "may be somebody else's"
    assert observed.transfer(FAR, SMALL, Carried(sent=SMALL)) == ["tcp"]
    assert observed.transfer(NEAR, SMALL, Carried(sent=SMALL)) == ["tcp"]
    assert observed.transfer(NEAR, SMALL, Carried(sent=25)) == ["cma", "tcp"]
    assert observed.carriers.begin(NEAR, LARGE, is_read=False, busy=[]) is None, "known"


def test_a_read_counts_what_was_received(observed: Observed) -> None:
    assert observed.transfer(NEAR, LARGE, Carried(LARGE, 0), is_read=True) == ["cma"]
    assert observed.transfer(FAR, LARGE, Carried(0, LARGE), is_read=True) == ["cma", "tcp"]


def test_a_transfer_that_is_tiny_or_failed_tells_nothing(observed: Observed) -> None:
    assert observed.transfer(NEAR, SMALL - 1, Carried()) == []
    sample = observed.carriers.begin(NEAR, SMALL, is_read=False, busy=[])
    assert sample is not None
    observed.carriers.end(sample, is_done=False)
    assert observed.carriers.seen == []


def test_another_peers_bytes_make_no_tcp(observed: Observed) -> None:
    observed.busiest = Carried(sent=LARGE)
    crowded_from_the_start = observed.carriers.begin(NEAR, LARGE, is_read=False, busy=[FAR])
    crowded_later = observed.carriers.begin(NEAR, LARGE, is_read=False, busy=[NEAR])
    assert crowded_from_the_start is not None
    assert crowded_later is not None
    observed.carriers.begin(FAR, 1, is_read=False, busy=[NEAR])
    for sample in (crowded_from_the_start, crowded_later):
        observed.carriers.end(sample, is_done=True)
    assert observed.carriers.seen == []


def test_a_peer_that_never_tells_is_left_alone_until_it_is_forgotten(observed: Observed) -> None:
    def look() -> bool:
        sample = observed.carriers.begin(NEAR, LARGE, is_read=False, busy=[FAR])
        if sample is not None:
            observed.carriers.end(sample, is_done=True)
        return sample is not None

    observed.busiest = Carried(sent=LARGE)
    assert [look() for _ in range(40)] == [True] * 32 + [False] * 8
    observed.carriers.forget(NEAR)
    assert look()


def test_a_forgotten_peer_is_found_out_anew(observed: Observed) -> None:
    observed.transfer(NEAR, SMALL, Carried())
    observed.transfer(FAR, SMALL, Carried(sent=SMALL))
    observed.carriers.forget(NEAR)
    observed.carriers.forget(FAR)
    assert observed.carriers.seen == []
    assert observed.transfer(FAR, SMALL, Carried(sent=SMALL)) == [], "the first sight again"


def test_sockets_count_what_they_sent_and_received_each_by_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with (
            socket.create_connection(server.getsockname()) as here,
            server.accept()[0] as there,
        ):
            here.sendall(b"x" * 1000)
            there.recv(1000, socket.MSG_WAITALL)
            there.sendall(b"y")  # carries the acknowledgement
            here.recv(1)
            before = tcp_traffic()
            here.sendall(b"x" * 5000)
            there.recv(5000, socket.MSG_WAITALL)
            there.sendall(b"y" * 70)
            here.recv(70, socket.MSG_WAITALL)
            assert busiest_since(before) == Carried(sent=5000, received=5000)
        assert busiest_since(before).sent < 5000, "closed sockets count for nothing"
    left, right = socket.socketpair()
    with left, right:
        before = tcp_traffic()
        left.sendall(b"z" * 9000)
        assert busiest_since(before).sent < 9000, "no TCP"
