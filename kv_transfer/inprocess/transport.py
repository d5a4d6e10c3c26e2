"""A fabric inside one process: the transport's fake for tests and simulation, faults included.

Every descriptor lands as an event of its own, and so do the rest of a write's and a read's life:

    write ---> descriptor ... descriptor ---> notification (at the target) -------> done
    read ----> descriptor ... descriptor ---> look at the source's seal (a fence) -> done or refused

each after a delay that is drawn; descriptors land in an order that is drawn. The source's bytes are
read when a descriptor lands, as hardware does, from the memory that was registered at their address
and into the one that was: after a fence, the sink. Time and dice are arguments, so the same seed
and the same calls give the same events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from core.errors import FabricError
from core.memory_region import SEAL_BYTES, MemoryRegion, seal_of
from kv_transfer.checksums import checksum_of
from kv_transfer.descriptors import check_spans
from kv_transfer.inprocess.known_peers import KnownPeers, Metadata
from kv_transfer.inprocess.model import (
    Descriptor,
    Dice,
    FabricEvent,
    Faults,
    Frozen,
    Kind,
    Port,
    Read,
    Registration,
    Transfer,
    Write,
)
from kv_transfer.inprocess.wire import Wire
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

_Pieces = list[tuple[memoryview, int]]
"""Source bytes, and the address that they are to land at."""


class InProcessFabric:
    """The hub: every agent's memory, a heap of events, and the faults.

    Args:
        now: monotonic seconds, real or simulated.
        rng: where delays, orders and faults are drawn from.
        faults: may be replaced at any time (`faults`).
        on_event: is told everything that happens, for logs and invariants.
        lock: re-entrant; needed where transports run on several threads.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        rng: Dice,
        faults: Faults | None = None,
        on_event: Callable[[FabricEvent], None] | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.lock = lock or nullcontext()
        self._now = now
        self._rng = rng
        self._wire = Wire(rng, faults or Faults(), on_event)
        self._ports: dict[PeerName, Port] = {}
        self._heap: list[tuple[float, int, Transfer]] = []
        self._stalled: list[Transfer] = []
        self._num_scheduled = 0
        self._num_lives = 0
        self._num_transfers = 0

    @property
    def faults(self) -> Faults:
        """What happens to every write and read from now on."""
        return self._wire.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._wire.faults = faults

    def transport(self, name: PeerName) -> InProcessTransport:
        """Return a new agent.

        Raises:
            FabricError: a live one has this name.
        """
        with self.lock:
            known = self._ports.get(name)
            if known is not None and known.is_alive:
                msg = f"an agent named {name!r} is alive"
                raise FabricError(msg)
            self._num_lives += 1
            port = self._ports[name] = Port(name, self._num_lives)
            return InProcessTransport(self, port)

    # --- time -------------------------------------------------------------------------------------

    def next_at(self) -> float | None:
        """Return when the next event is due; None while nothing moves."""
        with self.lock:
            return self._heap[0][0] if self._heap else None

    def step(self) -> int:
        """Let everything happen that is due now; return how many events were. Transports call it
        when they are polled."""
        num_events = 0
        with self.lock:
            now = self._now()
            while self._heap and self._heap[0][0] <= now:
                at, _, transfer = heapq.heappop(self._heap)
                self._advance(transfer, at)
                num_events += 1
        return num_events

    # --- faults -----------------------------------------------------------------------------------

    def freeze(self, name: PeerName, how: Frozen) -> None:
        """Stop a peer. Its owner must not call its transport until `thaw`."""
        with self.lock:
            self._ports[name].frozen = how

    def thaw(self, name: PeerName) -> None:
        """Let a frozen peer go on, and its late writes with it."""
        with self.lock:
            self._ports[name].frozen = None
            self._resume()

    def cut(self, source: PeerName, target: PeerName) -> None:
        """Stop what goes from `source` to `target`, and only that."""
        with self.lock:
            self._wire.cut.add((source, target))

    def heal(self, source: PeerName, target: PeerName) -> None:
        """Undo `cut`."""
        with self.lock:
            self._wire.cut.discard((source, target))
            self._resume()

    def kill(self, name: PeerName, *, buffered_descriptors: int = 0) -> None:
        """End a peer's process.

        Args:
            buffered_descriptors: how many descriptors of each of its writes were in its kernel's
                buffers, and land yet.
        """
        with self.lock:
            port = self._ports[name]
            port.is_alive = False
            port.frozen = None
            for moving in (*self._stalled, *(entry[2] for entry in self._heap)):
                if isinstance(moving, Write) and moving.source is port:
                    moving.capture(buffered_descriptors)
            self._resume()

    # --- for the transports -----------------------------------------------------------------------

    def is_alive(self, name: PeerName, life: int) -> bool:
        """Return whether an agent's life goes on."""
        port = self._ports.get(name)
        return port is not None and port.life == life and port.is_alive

    def post(self, source: Port, target: PeerName, tag: bytes, pieces: _Pieces) -> Write:
        """Start a write."""
        write = Write(self._next_handle(), source, self._ports[target], tag)
        self._start(write, pieces)
        return write

    def fetch(
        self, source: PeerName, target: Port, pieces: _Pieces, verify: Callable[[], str]
    ) -> Read:
        """Start a read; `verify` see `Read`."""
        read = Read(self._next_handle(), self._ports[source], target, verify)
        self._start(read, pieces)
        return read

    def unposted(
        self, poster: Port, peer: PeerName, poll: Poll, *, is_read: bool = False
    ) -> Transfer:
        """Return a write or read that was over before a byte moved."""
        other, handle = self._ports.get(peer) or Port(peer, 0), self._next_handle()
        transfer: Transfer = (  # a read that does not start is not verified
            Read(handle, other, poster, str) if is_read else Write(handle, poster, other, b"")
        )
        self._wire.end(transfer, self._now(), poll)
        return transfer

    def memory_of(self, name: PeerName, address: int, num_bytes: int) -> memoryview | None:
        """Return what a peer had last registered at an address, if anything."""
        return self._ports[name].memory_at(address, num_bytes)

    def _next_handle(self) -> TransferHandle:
        self._num_transfers += 1
        return TransferHandle(self._num_transfers)

    # --- a write's and a read's life --------------------------------------------------------------

    def _start(self, transfer: Transfer, pieces: _Pieces) -> None:
        transfer.descriptors = [
            Descriptor(index, memory, address) for index, (memory, address) in enumerate(pieces)
        ]
        self._rng.shuffle(transfer.descriptors)
        self._wire.tell(transfer, Kind.POSTED, self._now())
        self._schedule(transfer, self._now())

    def _schedule(self, transfer: Transfer, after: float) -> None:
        delay = self._rng.uniform(self.faults.min_delay_s, self.faults.max_delay_s)
        self._num_scheduled += 1
        heapq.heappush(self._heap, (after + delay, self._num_scheduled, transfer))

    def _resume(self) -> None:
        stalled, self._stalled = self._stalled, []
        for transfer in stalled:
            self._schedule(transfer, self._now())

    def _advance(self, transfer: Transfer, at: float) -> None:
        if self._wire.is_stalled(transfer):
            self._stalled.append(transfer)
        elif self._wire.advance(transfer, at):
            self._schedule(transfer, at)


class InProcessTransport:
    """`kv_transfer.transport.Transport` on an `InProcessFabric`, which makes it."""

    def __init__(self, fabric: InProcessFabric, port: Port) -> None:
        self._fabric = fabric
        self._port = port
        self._region: MemoryRegion | None = None
        self._peers = KnownPeers(fabric.is_alive)
        self._transfers: dict[TransferHandle, Transfer] = {}

    @property
    def name(self) -> PeerName:
        """This side's agent name."""
        return self._port.name

    def register(self, region: MemoryRegion) -> None:
        """Register the region where it is now; what was registered before can still be hit by
        writes under way."""
        with self._fabric.lock:
            self._region = region
            self._port.registrations.append(Registration(region.address, region.sealed_view()))

    def metadata(self) -> bytes:
        """Return the agent's life and registered range as JSON."""
        if self._region is None:
            msg = "metadata before register"
            raise FabricError(msg)
        port, current = self._port, self._port.registrations[-1]
        return msgspec.json.encode(
            Metadata(port.name, port.life, current.address, len(current.memory))
        )

    def add_peer(self, name: PeerName, metadata: bytes) -> None:
        """Learn or replace a peer."""
        self._peers.add(name, metadata)

    def checksum(self, spans: Sequence[Span]) -> int:
        """Return the CRC-32 of bytes of the registered region.

        Raises:
            FabricError: nothing is registered.
        """
        return checksum_of(self._region, spans)

    def remove_peer(self, name: PeerName) -> None:
        """Forget a peer."""
        self._peers.remove(name)

    def write(
        self, remote: RemoteRegion, local: Sequence[Span], target: Sequence[Span], tag: bytes
    ) -> TransferHandle:
        """Post a write.

        Raises:
            ValueError, FabricError: see `Transport.write`.
        """
        if not tag:
            msg = "a write's tag is empty"
            raise ValueError(msg)
        self._check_arguments(remote, local, target)
        with self._fabric.lock:
            obstacle = self._peers.obstacle(remote, target)
            if obstacle is not None:
                write = self._fabric.unposted(self._port, remote.peer, obstacle)
            else:
                pieces = [
                    (self._memory(here), remote.address + there.offset)
                    for here, there in zip(local, target, strict=True)
                ]
                write = self._fabric.post(self._port, remote.peer, tag, pieces)
            self._transfers[write.handle] = write
        return write.handle

    def read(
        self, remote: RemoteRegion, local: Sequence[Span], source: Sequence[Span]
    ) -> TransferHandle:
        """Post a read.

        Raises:
            ValueError, FabricError: see `Transport.read`.
        """
        region = self._check_arguments(remote, local, source)
        seal = Span(remote.num_bytes, SEAL_BYTES)
        with self._fabric.lock:
            obstacle = self._peers.obstacle(remote, (*source, seal))
            if obstacle is not None:
                read = self._fabric.unposted(self._port, remote.peer, obstacle, is_read=True)
            else:
                base = self._port.registrations[-1].address
                pieces = [
                    (self._memory_there(remote, there), base + here.offset)
                    for here, there in zip(local, source, strict=True)
                ]
                seal_there, generation = self._memory_there(remote, seal), region.generation

                def verify() -> str:
                    if bytes(seal_there) != seal_of(remote.generation):
                        return f"the source moved: no longer generation {remote.generation}"
                    is_same = region.generation == generation
                    return "" if is_same else "the region here moved under the read"

                read = self._fabric.fetch(remote.peer, self._port, pieces, verify)
            self._transfers[read.handle] = read
        return read.handle

    def poll(self, handle: TransferHandle) -> Poll:
        """Return a write's or read's state."""
        with self._fabric.lock:
            self._fabric.step()
            poll = self._transfers[handle].poll
            if poll.state is not TransferState.PENDING:
                del self._transfers[handle]
        return poll

    def notifications(self) -> list[Notification]:
        """Return what arrived."""
        with self._fabric.lock:
            self._fabric.step()
            arrived, self._port.arrived = self._port.arrived, []
        return arrived

    def health(self) -> Health:
        """Return whether the agent is alive."""
        is_alive = self._port.is_alive
        return Health(ok=is_alive, transport="inprocess", reason="" if is_alive else "closed")

    def close(self) -> None:
        """Destroy the agent; idempotent."""
        if self._fabric.is_alive(self._port.name, self._port.life):
            self._fabric.kill(self._port.name)
        self._transfers.clear()

    def _check_arguments(
        self, remote: RemoteRegion, local: Sequence[Span], there: Sequence[Span]
    ) -> MemoryRegion:
        if self._region is None or not self._port.is_alive:
            msg = "a write or read before register, or after close"
            raise FabricError(msg)
        check_spans(local, self._region.num_bytes, there, remote.num_bytes)
        return self._region

    def _memory(self, here: Span) -> memoryview:
        memory = self._port.registrations[-1].memory
        return memory[here.offset : here.offset + here.num_bytes]

    def _memory_there(self, remote: RemoteRegion, there: Span) -> memoryview:
        address = remote.address + there.offset
        memory = self._fabric.memory_of(remote.peer, address, there.num_bytes)
        assert memory is not None, "what a peer's metadata names was registered"
        return memory
