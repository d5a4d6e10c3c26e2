"""The default backend: NIXL 1.5 over UCX (CMA or TCP on one host, RDMA between hosts).

Measured, and relied on here: a request's exceptions can come from preparing, posting or polling,
and all mean FAILED (preparing moves nothing, but a connection in error may show there, and only
FAILED has the writer connect anew); with a peer that is frozen it stays PENDING for ever (a read
over CMA does not: it needs nobody there); a new agent under a known name breaks the pair unless the
old one is removed; removing a peer fails the writes to it that are under way, although their bytes
land; a read of memory that was deregistered and moved away is DONE, and brings zeros; an agent that
is destroyed while a connection comes about, with transfers that wait for it, ends the process (an
assertion in UCX's arbiter.c: 1 in 2 where it was provoked).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from core.errors import FabricError
from core.memory_region import MemoryRegion
from kv_transfer.checksums import checksum_of
from kv_transfer.descriptors import check_spans
from kv_transfer.generations import Generations
from kv_transfer.nixl.agent import Descriptor, NixlAgent, Request
from kv_transfer.nixl.bindings import Registration
from kv_transfer.nixl.carriers import Carriers, Sample
from kv_transfer.nixl.seals import Seals, seal_descriptor
from kv_transfer.transport import (
    Health,
    Notification,
    PeerName,
    Poll,
    RemoteRegion,
    Span,
    TransferHandle,
    TransferState,
)

_CONNECTING_S = 1.0
"""How long `close` waits for connections that have begun; 70 ms is usual. One to a frozen peer does
not come about, and then does no harm."""

_CONNECTING_POLL_S = 0.001

_DONE = Poll(TransferState.DONE)
_PENDING = Poll(TransferState.PENDING)


class _Check(msgspec.Struct):
    """What a read has yet to find out when its bytes are here.

    Attributes:
        generation: of the region here when the read was posted.
        slot: where the source's seal lands; None before it is asked for.
    """

    source: RemoteRegion
    generation: int
    slot: int | None = None


class _Transfer(msgspec.Struct):
    """A posted write, or a read, which has a `check`.

    Attributes:
        request: None where nothing is left to ask NIXL about.
        sample: where it is to tell what carries its bytes.
    """

    peer: PeerName
    sample: Sample | None = None
    check: _Check | None = None
    request: Request | None = None
    outcome: Poll = _PENDING


class NixlTransport:
    """`kv_transfer.transport.Transport` over one NIXL agent.

    Args:
        name: the agent's name, ``<worker id>@<boot>``.
        listen: see `NixlAgent`.

    Raises:
        FabricError: NIXL or UCX does not start.
    """

    def __init__(self, name: PeerName, *, listen: str = "127.0.0.1") -> None:
        self._name = name
        self._agent = NixlAgent(name, listen=listen)
        self._region: MemoryRegion | None = None
        self._base = 0  # where the region was registered; a fence moves it
        self._registration: Registration | None = None
        self._peers: set[PeerName] = set()
        self._connected: set[PeerName] = set()  # a transfer with them was complete
        self._transfers: dict[TransferHandle, _Transfer] = {}
        self._num_transfers = 0
        self._seals: Seals | None = None
        self._carriers = Carriers()
        self._generations = Generations()
        self._trouble = ""

    @property
    def name(self) -> PeerName:
        """This side's agent name."""
        return self._name

    def register(self, region: MemoryRegion) -> None:
        """Register the region where it is now, in place of what was registered before."""
        if self._registration is not None:
            self._agent.deregister(self._registration)
            self._registration = None
        self._registration = self._agent.register(region.address, len(region.sealed_view()))
        self._region, self._base = region, region.address

    def metadata(self) -> bytes:
        """Return NIXL's metadata; changes with every `register`."""
        return self._agent.metadata()

    def add_peer(self, name: PeerName, metadata: bytes) -> None:
        """Learn a peer. Newer metadata of the same life is added to what is known, for removing
        would fail the writes under way; a new life under an old name replaces it."""
        if name.encode() not in metadata:
            msg = f"the metadata is not that of {name!r}"
            raise FabricError(msg)
        if name in self._peers:
            with contextlib.suppress(FabricError):  # NIXL refuses another life's
                self._load_peer(name, metadata)
                return
            self.remove_peer(name)
        self._load_peer(name, metadata)
        self._peers.add(name)

    def checksum(self, spans: Sequence[Span]) -> int:
        """Return the CRC-32 of bytes of the registered region.

        Raises:
            FabricError: nothing is registered.
        """
        return checksum_of(self._region, spans)

    def remove_peer(self, name: PeerName) -> None:
        """Forget a peer."""
        if name in self._peers:
            self._peers.discard(name)
            self._connected.discard(name)
            self._carriers.forget(name)
            self._generations.forget(name)
            with contextlib.suppress(FabricError):  # a dead peer cannot be disconnected from
                self._agent.forget_peer(name)

    def write(
        self, remote: RemoteRegion, local: Sequence[Span], target: Sequence[Span], tag: bytes
    ) -> TransferHandle:
        """Post a write; merge neighbours first (`descriptors.merge_neighbours`), descriptors cost.

        Raises:
            ValueError, FabricError: see `Transport.write`.
        """
        if not tag:
            msg = "a write's tag is empty"
            raise ValueError(msg)
        self._check_arguments(remote, local, target)
        handle, transfer = self._open(remote, local, is_read=False)
        if transfer.outcome is _PENDING:
            here, there = self._here(local), _there(remote, target)
            prepare = self._agent.prepare_write
            self._start(transfer, lambda: prepare(remote.peer, here, there, tag), tag)
        return handle

    def read(
        self, remote: RemoteRegion, local: Sequence[Span], source: Sequence[Span]
    ) -> TransferHandle:
        """Post a read, which ends with the look at the source's seal.

        Raises:
            ValueError, FabricError: see `Transport.read`.
        """
        region = self._check_arguments(remote, local, source)
        handle, transfer = self._open(remote, local, is_read=True)
        if transfer.outcome is not _PENDING:
            return handle
        transfer.check = _Check(remote, region.generation)
        here, there = self._here(local), _there(remote, source)
        self._start(transfer, lambda: self._agent.prepare_read(remote.peer, here, there), b"")
        return handle

    def poll(self, handle: TransferHandle) -> Poll:
        """Return a write's or read's state."""
        transfer = self._transfers[handle]
        if transfer.request is not None:
            try:
                if self._agent.is_done(transfer.request):
                    self._request_done(transfer)
            except FabricError as error:
                self._end(transfer, Poll(TransferState.FAILED, str(error)))
        if transfer.outcome.state is not TransferState.PENDING:
            del self._transfers[handle]
        return transfer.outcome

    def notifications(self) -> list[Notification]:
        """Return what arrived; UCX makes its progress for inbound traffic in here."""
        try:
            arrived = self._agent.notifications()
        except FabricError as error:
            self._trouble = str(error)
            return []
        self._trouble = ""
        return [
            Notification(PeerName(peer), payload)
            for peer, payloads in arrived.items()
            for payload in payloads
        ]

    def health(self) -> Health:
        """Return "ucx", and what carries the bytes as far as it was found out (`carriers`)."""
        seen = ", ".join(self._carriers.seen)
        transport = f"ucx ({seen})" if seen else "ucx"
        return Health(ok=not self._trouble, transport=transport, reason=self._trouble)

    def close(self) -> None:
        """Destroy the agent, once it is not in the midst of connecting."""
        for _ in range(round(_CONNECTING_S / _CONNECTING_POLL_S)):
            waiting = self._waiting_for_a_connection()
            if not waiting:
                break
            for handle in waiting:
                self.poll(handle)
            time.sleep(_CONNECTING_POLL_S)
        self._transfers.clear()
        self._agent.close()

    def _waiting_for_a_connection(self) -> list[TransferHandle]:
        return [
            handle
            for handle, transfer in self._transfers.items()
            if transfer.request is not None and transfer.peer not in self._connected
        ]

    def _load_peer(self, name: PeerName, metadata: bytes) -> None:
        given = self._agent.load_peer(metadata)
        if given != name:
            msg = f"metadata of {given!r} was given for {name!r}"
            raise FabricError(msg)

    # --- one transfer -----------------------------------------------------------------------------

    def _check_arguments(
        self, remote: RemoteRegion, local: Sequence[Span], there: Sequence[Span]
    ) -> MemoryRegion:
        if self._region is None:
            msg = "a write or read before register"
            raise FabricError(msg)
        check_spans(local, self._region.num_bytes, there, remote.num_bytes)
        return self._region

    def _open(
        self, remote: RemoteRegion, local: Sequence[Span], *, is_read: bool
    ) -> tuple[TransferHandle, _Transfer]:
        """Return a transfer that is still to be started, or was refused."""
        self._num_transfers += 1
        handle = TransferHandle(self._num_transfers)
        refusal = self._refusal(remote)
        if refusal:
            outcome = Poll(TransferState.REFUSED, refusal)
            transfer = _Transfer(remote.peer, outcome=outcome)
        else:
            num_bytes = sum(span.num_bytes for span in local)
            busy = (other.peer for other in self._transfers.values())
            sample = self._carriers.begin(remote.peer, num_bytes, is_read=is_read, busy=busy)
            transfer = _Transfer(remote.peer, sample)
        self._transfers[handle] = transfer
        return handle, transfer

    def _refusal(self, remote: RemoteRegion) -> str:
        """Return why a transfer cannot start; empty if it can."""
        if remote.peer not in self._peers:
            return f"unknown peer {remote.peer!r}"
        return self._generations.refusal(remote)

    def _here(self, spans: Sequence[Span]) -> list[Descriptor]:
        return [(self._base + span.offset, span.num_bytes) for span in spans]

    def _start(self, transfer: _Transfer, prepare: Callable[[], Request], tag: bytes) -> None:
        try:
            transfer.request = prepare()
            if self._agent.post(transfer.request, tag):
                self._request_done(transfer)
        except FabricError as error:
            self._end(transfer, Poll(TransferState.FAILED, str(error)))

    def _request_done(self, transfer: _Transfer) -> None:
        self._release(transfer)
        self._connected.add(transfer.peer)
        check = transfer.check
        if check is None:
            self._end(transfer, _DONE)
        elif check.slot is None:
            self._fetch_seal(transfer, check)
        else:
            self._end(transfer, self._judge(check, check.slot))

    def _fetch_seal(self, transfer: _Transfer, check: _Check) -> None:
        self._seals = self._seals or Seals(self._agent)
        check.slot = self._seals.take()
        if check.slot is None:
            self._end(transfer, Poll(TransferState.REFUSED, "too many reads wait for a seal"))
            return
        here, there = [self._seals.place(check.slot)], [seal_descriptor(check.source)]
        self._start(transfer, lambda: self._agent.prepare_read(transfer.peer, here, there), b"")

    def _judge(self, check: _Check, slot: int) -> Poll:
        """Say how a read ended whose bytes and seal are here. The slot of one whose seal did not
        come stays taken, for it may come yet."""
        assert self._seals is not None
        assert self._region is not None
        is_intact = self._seals.is_of(slot, check.source)
        self._seals.give_back(slot)
        if not is_intact:
            reason = f"the source moved: it is no longer generation {check.source.generation}"
            return Poll(TransferState.REFUSED, reason)
        if self._region.generation != check.generation:
            return Poll(TransferState.REFUSED, "the region here moved under the read")
        return _DONE

    def _end(self, transfer: _Transfer, outcome: Poll) -> None:
        transfer.outcome = outcome
        if transfer.sample is not None:
            self._carriers.end(transfer.sample, is_done=outcome.state is TransferState.DONE)
        self._release(transfer)

    def _release(self, transfer: _Transfer) -> None:
        request, transfer.request = transfer.request, None
        if request is not None:
            # A failed request may refuse; it dies with the agent.
            with contextlib.suppress(FabricError):
                self._agent.release(request)


def _there(remote: RemoteRegion, spans: Sequence[Span]) -> list[Descriptor]:
    return [(remote.address + span.offset, span.num_bytes) for span in spans]
