"""What carries the bytes to and from each peer: UCX chooses, and does not say.

A transfer's own size tells it. Over TCP its bytes go through a socket of this process; over CMA the
sockets see 25 bytes of it, and a write's notification. Whatever else the process sends meanwhile
only adds to that, so few bytes prove CMA (or RDMA, where there is a device: no socket sees that
either), and many make TCP likely: they count when nothing went to another peer at the same time,
and, of a transfer below 1 MiB, when the next one says so too. Below 4 KiB a notification and
opening the connection weigh as much as the bytes, and nothing is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kv_transfer.nixl.tcp_traffic import Traffic, busiest_since, tcp_traffic
from kv_transfer.transport import PeerName

_TELLING_BYTES = 4096
_CERTAIN_BYTES = 1 << 20
_MAX_LANES = 4
"""UCX stripes a transfer over so many sockets at most, unless UCX_MAX_RMA_LANES says otherwise."""

_MAX_SAMPLES = 32
"""Of one peer: looking at the sockets takes about a millisecond, and where transfers to several
peers always overlap it may never tell."""

_HAS_RDMA = Path("/sys/class/infiniband").exists()


class Sample(msgspec.Struct):
    """One transfer that is to tell.

    Attributes:
        before: the sockets when it began.
        is_crowded: another peer was written to, or read from, meanwhile.
    """

    peer: PeerName
    num_bytes: int
    is_read: bool
    before: Traffic
    is_crowded: bool


class Carriers:
    """What is known so far; a peer's is found out once."""

    def __init__(self) -> None:
        self._by_peer: dict[PeerName, str] = {}
        self._likely_tcp: set[PeerName] = set()
        self._num_samples: Counter[PeerName] = Counter()
        self._open: list[Sample] = []

    @property
    def seen(self) -> list[str]:
        """The carriers of all present peers, each once."""
        return sorted(set(self._by_peer.values()))

    def forget(self, peer: PeerName) -> None:
        """The peer was removed; its next connection may be another one."""
        self._by_peer.pop(peer, None)
        self._likely_tcp.discard(peer)
        del self._num_samples[peer]

    def begin(
        self, peer: PeerName, num_bytes: int, *, is_read: bool, busy: Iterable[PeerName]
    ) -> Sample | None:
        """Look at the sockets before a transfer; None where nothing is to be found out by it.

        Args:
            busy: the peers of transfers under way.
        """
        for other in self._open:
            other.is_crowded = other.is_crowded or other.peer != peer
        if peer in self._by_peer or num_bytes < _TELLING_BYTES:
            return None
        if self._num_samples[peer] == _MAX_SAMPLES:
            return None
        self._num_samples[peer] += 1
        is_crowded = any(other != peer for other in busy)
        sample = Sample(peer, num_bytes, is_read, tcp_traffic(), is_crowded)
        self._open.append(sample)
        return sample

    def end(self, sample: Sample, *, is_done: bool) -> None:
        """The transfer ended; only one that moved all its bytes tells."""
        self._open = [other for other in self._open if other is not sample]
        if not is_done:
            return
        carried = busiest_since(sample.before)
        through_tcp = carried.received if sample.is_read else carried.sent
        if through_tcp < sample.num_bytes // (2 * _MAX_LANES):
            self._by_peer[sample.peer] = "rdma or cma" if _HAS_RDMA else "cma"
        elif not sample.is_crowded:
            self._saw_tcp(sample)

    def _saw_tcp(self, sample: Sample) -> None:
        if sample.num_bytes >= _CERTAIN_BYTES or sample.peer in self._likely_tcp:
            self._by_peer[sample.peer] = "tcp"
        self._likely_tcp.add(sample.peer)
