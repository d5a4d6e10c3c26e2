"""The default backend: NIXL 1.5 over UCX (CMA or TCP on one host, RDMA between hosts).

Measured, and relied on here: a write's exceptions can come from preparing, posting or polling, and
all mean FAILED (preparing moves nothing, but a connection in error may show there, and only FAILED
has the writer connect anew); a peer that is frozen stays PENDING for ever; a new agent under a
known name breaks the pair unless the old one is removed; removing a peer fails the writes to it
that are under way, although their bytes land.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from core.errors import FabricError
from core.memory_region import MemoryRegion
from kv_transfer.descriptors import check_bounds
from kv_transfer.nixl.agent import NixlAgent, Request
from kv_transfer.nixl.bindings import Registration
from kv_transfer.nixl.tcp_traffic import acked_by_socket, acked_since
from kv_transfer.transport import (
    Health,
    Notification,
    PeerName,
    Poll,
    RemoteRegion,
    Span,
    WriteHandle,
    WriteState,
)

_TELLING_BYTES = 1 << 20
_HAS_RDMA = Path("/sys/class/infiniband").exists()
_DONE = Poll(WriteState.DONE)
_PENDING = Poll(WriteState.PENDING)


class _Write(msgspec.Struct):
    """A posted write.

    Attributes:
        request: None where nothing is left to ask NIXL about.
        acked_before: this process's TCP traffic before it, where it is to tell the transport.
    """

    peer: PeerName
    num_bytes: int
    acked_before: dict[str, int] | None
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
        self._writes: dict[WriteHandle, _Write] = {}
        self._num_writes = 0
        self._carriers: dict[PeerName, str] = {}
        self._generations: dict[PeerName, int] = {}
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
        self._registration = self._agent.register(region.address, region.num_bytes)
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

    def remove_peer(self, name: PeerName) -> None:
        """Forget a peer."""
        if name in self._peers:
            self._peers.discard(name)
            self._carriers.pop(name, None)
            self._generations.pop(name, None)
            with contextlib.suppress(FabricError):  # a dead peer cannot be disconnected from
                self._agent.forget_peer(name)

    def write(
        self, remote: RemoteRegion, local: Sequence[Span], target: Sequence[Span], tag: bytes
    ) -> WriteHandle:
        """Post a write; merge neighbours first (`descriptors.merge_neighbours`), descriptors cost.

        Raises:
            ValueError: a span lies outside its region.
            FabricError: nothing is registered here.
        """
        if self._region is None:
            msg = "write before register"
            raise FabricError(msg)
        check_bounds(local, self._region.num_bytes, "local")
        check_bounds(target, remote.num_bytes, "target")
        self._num_writes += 1
        handle = WriteHandle(self._num_writes)
        write = self._writes[handle] = self._new_write(remote.peer, local)
        refusal = self._refusal(remote)
        if refusal:
            write.outcome = Poll(WriteState.REFUSED, refusal)
            return handle
        try:
            write.request = self._agent.prepare_write(
                remote.peer,
                [(self._base + span.offset, span.num_bytes) for span in local],
                [(remote.address + span.offset, span.num_bytes) for span in target],
                tag,
            )
            if self._agent.post(write.request, tag):
                self._finish(write, _DONE)
        except FabricError as error:
            self._finish(write, Poll(WriteState.FAILED, str(error)))
        return handle

    def poll(self, handle: WriteHandle) -> Poll:
        """Return a write's state."""
        write = self._writes[handle]
        if write.request is not None:
            try:
                if self._agent.is_done(write.request):
                    self._finish(write, _DONE)
            except FabricError as error:
                self._finish(write, Poll(WriteState.FAILED, str(error)))
        if write.outcome.state is not WriteState.PENDING:
            del self._writes[handle]
        return write.outcome

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
        """Return "ucx" until a write of 1 MiB was done, then also what carried it."""
        seen = ", ".join(sorted(set(self._carriers.values())))
        transport = f"ucx ({seen})" if seen else "ucx"
        return Health(ok=not self._trouble, transport=transport, reason=self._trouble)

    def close(self) -> None:
        """Destroy the agent."""
        self._writes.clear()
        self._agent.close()

    def _load_peer(self, name: PeerName, metadata: bytes) -> None:
        given = self._agent.load_peer(metadata)
        if given != name:
            msg = f"metadata of {given!r} was given for {name!r}"
            raise FabricError(msg)

    def _refusal(self, remote: RemoteRegion) -> str:
        """Return why a write cannot start; empty if it can. NIXL knows all addresses that a peer
        ever registered, so generations are compared here."""
        if remote.peer not in self._peers:
            return f"unknown peer {remote.peer!r}"
        newest = self._generations.setdefault(remote.peer, remote.generation)
        if remote.generation < newest:
            return f"stale region generation {remote.generation}, a write to {newest} was posted"
        self._generations[remote.peer] = remote.generation
        return ""

    def _new_write(self, peer: PeerName, local: Sequence[Span]) -> _Write:
        num_bytes = sum(span.num_bytes for span in local)
        is_telling = num_bytes >= _TELLING_BYTES and peer not in self._carriers
        return _Write(peer, num_bytes, acked_by_socket() if is_telling else None)

    def _finish(self, write: _Write, outcome: Poll) -> None:
        request, write.request, write.outcome = write.request, None, outcome
        self._tell_transport(write)
        if request is not None:
            # A failed request may refuse; it dies with the agent.
            with contextlib.suppress(FabricError):
                self._agent.release(request)

    def _tell_transport(self, write: _Write) -> None:
        """UCX does not say what it chose, but a large write shows: either its bytes went through
        TCP sockets or not, and without an RDMA device only CMA is left in NIXL's wheel."""
        if write.acked_before is None or write.outcome.state is not WriteState.DONE:
            return
        if acked_since(write.acked_before) >= write.num_bytes // 2:
            self._carriers[write.peer] = "tcp"
        else:
            self._carriers[write.peer] = "rdma or cma" if _HAS_RDMA else "cma"
