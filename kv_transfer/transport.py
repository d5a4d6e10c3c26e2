"""The one seam of the fabric: a transport moves bytes one-sidedly between registered regions.

A write carries one notification that becomes visible to the target after the write's bytes; a read
carries none. No method waits for a peer. All methods of one transport run on one thread
(`TransferThread`).

Who owns what: the caller's blocks of a write or a read stay owned and held by it until `poll` says
DONE, or until the transport was destroyed; FAILED says nothing about whether bytes still land.
REFUSED says that none moves any more and that the blocks are free to go: a write was not posted, a
read was not, or what it brought is not the source's.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NewType, Protocol

import msgspec

from core.ids import Boot
from core.memory_region import MemoryRegion

PeerName = NewType("PeerName", str)
"""Agent name on the fabric: ``<worker id>@<boot>``; a restarted worker is another peer."""

TransferHandle = NewType("TransferHandle", int)


class TransferState(enum.Enum):
    """Where a write or a read stands."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"


class Poll(msgspec.Struct, frozen=True):
    """A write's or read's state, and the reason where it failed or was refused."""

    state: TransferState
    reason: str = ""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes relative to a region's start."""

    offset: int
    num_bytes: int


class RemoteRegion(msgspec.Struct, frozen=True):
    """A peer's region as its descriptor gave it."""

    peer: PeerName
    boot: Boot
    address: int
    num_bytes: int
    generation: int


class Notification(msgspec.Struct, frozen=True):
    """What a peer's write brought, byte for byte as the writer gave it."""

    peer: PeerName
    payload: bytes


class Health(msgspec.Struct, frozen=True):
    """Whether the backend works, what it uses, and why not."""

    ok: bool
    transport: str
    reason: str = ""


class Transport(Protocol):
    """Backends: `nixl.transport.NixlTransport` (default), `inprocess.transport`."""

    @property
    def name(self) -> PeerName:
        """This side's agent name."""
        ...

    def register(self, region: MemoryRegion) -> None:
        """Make the region readable and writable by peers; again after its address changed (a
        fence)."""
        ...

    def metadata(self) -> bytes:
        """Return what a peer needs for `add_peer`; valid until the next `register`."""
        ...

    def add_peer(self, name: PeerName, metadata: bytes) -> None:
        """Learn a peer, or more of one that is known: newer metadata of the same life is added, and
        writes to it go on; another life of the same name replaces it.

        Raises:
            FabricError: the metadata is not of that peer, or not understood.
        """
        ...

    def remove_peer(self, name: PeerName) -> None:
        """Forget a peer; unknown names are ignored. Proves nothing about writes under way."""
        ...

    def checksum(self, spans: Sequence[Span]) -> int:
        """Return the CRC-32 of bytes of the region registered here, one span after the other.

        Raises:
            FabricError: nothing is registered.
        """
        ...

    def write(
        self, remote: RemoteRegion, local: Sequence[Span], target: Sequence[Span], tag: bytes
    ) -> TransferHandle:
        """Post one write of pairwise equal spans, with one notification `tag`.

        Never raises for the peer's state, which `poll` reports: REFUSED for a peer that is not
        known and for a region generation older than one that was used before, FAILED for all else.

        Raises:
            ValueError: spans differ or lie outside their region, or the tag is empty (NIXL would
                not notify); nothing was posted.
            FabricError: nothing is registered here, or it is closed; nothing was posted.
        """
        ...

    def read(
        self, remote: RemoteRegion, local: Sequence[Span], source: Sequence[Span]
    ) -> TransferHandle:
        """Post one read of pairwise equal spans of a peer's region into this side's.

        DONE says that every byte is here and was the source's: the region was still where `remote`
        says, of that generation, after the last byte had left. A region that a fence moved away
        ends it as REFUSED, whether the move was known or not, before the read or under it; so does
        a fence of the region here. All else as for `write`.

        The source's owner hears nothing of it, and must poll `notifications` meanwhile: over TCP
        its polls are what sends the bytes. It keeps the blocks until it is told that the read
        ended, and a reader counts among those who know an old address of a region.

        Raises:
            ValueError, FabricError: as for `write`.
        """
        ...

    def poll(self, handle: TransferHandle) -> Poll:
        """Return a write's or read's state; all but PENDING forget the handle. A write's
        notification may leave only when its writer polls, so poll every write to its end."""
        ...

    def notifications(self) -> list[Notification]:
        """Return and forget what arrived since the last call."""
        ...

    def health(self) -> Health:
        """Return the backend's state; cheap."""
        ...

    def close(self) -> None:
        """Destroy the agent: afterwards nothing of it writes or reads any more. Idempotent."""
        ...
