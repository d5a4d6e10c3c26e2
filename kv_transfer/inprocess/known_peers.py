"""What an in-process agent knows of others: their lives, and what these ever registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from core.errors import FabricError
from kv_transfer.generations import Generations
from kv_transfer.transport import PeerName, Poll, RemoteRegion, Span, TransferState


class Metadata(msgspec.Struct, frozen=True):
    """What a peer must know of an agent: which life, and what it has registered."""

    name: PeerName
    life: int
    address: int
    num_bytes: int

    def holds(self, address: int, num_bytes: int) -> bool:
        """Return whether all of these bytes are in it."""
        offset = address - self.address
        return offset >= 0 and offset + num_bytes <= self.num_bytes


class KnownPeers:
    """By name; of one life, all that it ever registered stays known, as over NIXL.

    Args:
        is_alive: whether a life of that name goes on.
    """

    def __init__(self, is_alive: Callable[[PeerName, int], bool]) -> None:
        self._is_alive = is_alive
        self._known: dict[PeerName, list[Metadata]] = {}
        self._generations = Generations()

    def add(self, name: PeerName, metadata: bytes) -> None:
        """Learn a peer, or more of it; another life replaces it.

        Raises:
            FabricError: the metadata is not of that peer, or not understood.
        """
        try:
            peer = msgspec.json.decode(metadata, type=Metadata)
        except msgspec.DecodeError as error:
            msg = f"metadata of {name!r} is not understood: {error}"
            raise FabricError(msg) from error
        if peer.name != name:
            msg = f"metadata of {peer.name!r} was given for {name!r}"
            raise FabricError(msg)
        known = [old for old in self._known.get(name, []) if old.life == peer.life]
        if not known:
            self._generations.forget(name)
        self._known[name] = [*known, peer]

    def remove(self, name: PeerName) -> None:
        """Forget a peer; unknown names are ignored."""
        self._known.pop(name, None)
        self._generations.forget(name)

    def obstacle(self, remote: RemoteRegion, there: Sequence[Span]) -> Poll | None:
        """Return how a write or read ends that cannot start; None if it can."""
        known = self._known.get(remote.peer)
        if known is None:
            return Poll(TransferState.REFUSED, f"unknown peer {remote.peer!r}")
        stale = self._generations.refusal(remote)
        if stale:
            return Poll(TransferState.REFUSED, stale)
        if not self._is_alive(remote.peer, known[-1].life):
            return Poll(TransferState.FAILED, "RemoteDisconnect: the peer is gone")
        for span in there:
            address = remote.address + span.offset
            if not any(part.holds(address, span.num_bytes) for part in known):
                reason = "NotFound: the address is not in the peer's metadata"
                return Poll(TransferState.FAILED, reason)
        return None
