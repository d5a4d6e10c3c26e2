"""A fabric inside one process: the transport's fake for tests and simulation, faults included.

Every descriptor lands as an event of its own, and so do a write's notification and its completion:

    post ---> descriptor ... descriptor ---> notification (at the target) ---> done (at the writer)

each after a delay that is drawn; descriptors land in an order that is drawn. The source's bytes are
read when a descriptor lands, as hardware does, and land in the memory that was registered at the
address written to: after a fence, in the sink. Time and dice are arguments, so the same seed and
the same calls give the same events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import assert_never

import msgspec

from core.errors import FabricError
from core.memory_region import MemoryRegion
from kv_transfer.descriptors import check_bounds
from kv_transfer.inprocess.model import (
    Descriptor,
    Dice,
    FabricEvent,
    Faults,
    Frozen,
    Kind,
    Port,
    Registration,
    Step,
    Write,
)
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


class InProcessFabric:
    """The hub: every agent's memory, a heap of events, and the faults.

    Args:
        now: monotonic seconds, real or simulated.
        rng: where delays, orders and faults are drawn from.
        faults: may be replaced at any time.
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
        self.faults = faults or Faults()
        self.lock = lock or nullcontext()
        self._now = now
        self._rng = rng
        self._on_event = on_event
        self._ports: dict[PeerName, Port] = {}
        self._cut: set[tuple[PeerName, PeerName]] = set()
        self._heap: list[tuple[float, int, Write]] = []
        self._stalled: list[Write] = []
        self._num_scheduled = 0
        self._num_lives = 0
        self._num_writes = 0

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
                at, _, write = heapq.heappop(self._heap)
                self._advance(write, at)
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
            self._cut.add((source, target))

    def heal(self, source: PeerName, target: PeerName) -> None:
        """Undo `cut`."""
        with self.lock:
            self._cut.discard((source, target))
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
            for write in (*self._stalled, *(entry[2] for entry in self._heap)):
                if write.source is port:
                    write.capture(buffered_descriptors)
            self._resume()

    # --- for the transports -----------------------------------------------------------------------

    def is_alive(self, name: PeerName, life: int) -> bool:
        """Return whether an agent's life goes on."""
        port = self._ports.get(name)
        return port is not None and port.life == life and port.is_alive

    def post(
        self, source: Port, target: PeerName, tag: bytes, spans: list[tuple[memoryview, int]]
    ) -> Write:
        """Start a write of (source bytes, target address) pairs."""
        write = self._new_write(source, self._ports[target], tag)
        write.descriptors = [
            Descriptor(index, memory, address) for index, (memory, address) in enumerate(spans)
        ]
        self._rng.shuffle(write.descriptors)
        write.step = Step.LAND if spans else Step.NOTIFY
        self._tell(write, Kind.POSTED, self._now())
        self._schedule(write, self._now())
        return write

    def unposted(self, source: Port, target: PeerName, poll: Poll) -> Write:
        """Return a write that was over before a byte moved."""
        write = self._new_write(source, self._ports.get(target) or Port(target, 0), b"")
        self._end_badly(write, self._now(), poll)
        return write

    def _new_write(self, source: Port, target: Port, tag: bytes) -> Write:
        self._num_writes += 1
        return Write(WriteHandle(self._num_writes), source, target, tag)

    # --- a write's life ---------------------------------------------------------------------------

    def _schedule(self, write: Write, after: float) -> None:
        delay = self._rng.uniform(self.faults.min_delay_s, self.faults.max_delay_s)
        self._num_scheduled += 1
        heapq.heappush(self._heap, (after + delay, self._num_scheduled, write))

    def _resume(self) -> None:
        stalled, self._stalled = self._stalled, []
        for write in stalled:
            self._schedule(write, self._now())

    def _advance(self, write: Write, at: float) -> None:
        if self._is_stalled(write):
            self._stalled.append(write)
        elif not write.source.is_alive:
            self._advance_buffered(write, at)
        elif not write.target.is_alive:
            self._fail(write, at, "RemoteDisconnect: the peer is gone")
        else:
            self._take_step(write, at)

    def _is_stalled(self, write: Write) -> bool:
        source, target = write.source, write.target
        if Frozen.ALL in (source.frozen, target.frozen):
            return True
        if write.step is Step.COMPLETE:
            return source.frozen is not None or (target.name, source.name) in self._cut
        if write.step is Step.NOTIFY and source.frozen is not None:
            return True  # the writer's software sends it
        return (source.name, target.name) in self._cut

    def _advance_buffered(self, write: Write, at: float) -> None:
        """Land what a dead writer's kernel had buffered; the rest never leaves."""
        if not write.target.is_alive:
            return
        if write.step is Step.LAND and write.captured:
            self._land(write, write.captured.pop(0), at)
        elif write.step is Step.NOTIFY and write.carries_notification:
            self._notify(write, at)
        else:
            return
        if write.poll.state is WriteState.PENDING:
            self._schedule(write, at)

    def _take_step(self, write: Write, at: float) -> None:
        match write.step:
            case Step.LAND:
                self._land(write, bytes(write.descriptors[0].source), at)
            case Step.NOTIFY:
                self._notify(write, at)
            case Step.COMPLETE:
                write.poll = Poll(WriteState.DONE)
                self._tell(write, Kind.DONE, at)
            case _:
                assert_never(write.step)
        if write.poll.state is WriteState.PENDING:
            self._schedule(write, at)

    def _land(self, write: Write, data: bytes, at: float) -> None:
        descriptor = write.descriptors.pop(0)
        memory = write.target.memory_at(descriptor.address, len(data))
        if memory is None:
            self._fail(write, at, "InvalidParam: the address was never registered")
            return
        if self._rng.random() < self.faults.loss:
            self._fail(write, at, "Backend: a descriptor was lost")
            return
        kind = Kind.LANDED
        if self._rng.random() < self.faults.corruption:
            data, kind = self._corrupted(data), Kind.CORRUPTED
        memory[:] = data
        self._tell(write, kind, at, descriptor.index)
        if not write.descriptors:
            write.step = Step.NOTIFY

    def _corrupted(self, data: bytes) -> bytes:
        index = self._rng.randrange(len(data))
        return data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :]

    def _notify(self, write: Write, at: float) -> None:
        write.step = Step.COMPLETE
        if self._rng.random() < self.faults.notification_loss:
            self._tell(write, Kind.NOTIFICATION_LOST, at)
            return
        write.target.arrived.append(Notification(write.source.name, write.tag))
        self._tell(write, Kind.NOTIFIED, at)

    def _fail(self, write: Write, at: float, reason: str) -> None:
        self._end_badly(write, at, Poll(WriteState.FAILED, reason))

    def _end_badly(self, write: Write, at: float, poll: Poll) -> None:
        write.poll = poll
        self._tell(write, Kind.FAILED, at)

    def _tell(self, write: Write, kind: Kind, at: float, index: int = -1) -> None:
        if self._on_event is not None:
            source, target = write.source.name, write.target.name
            self._on_event(FabricEvent(at, kind, source, target, write.handle, index))


class _Metadata(msgspec.Struct, frozen=True):
    """What a peer must know of an agent: which life, and what it registered."""

    name: PeerName
    life: int
    address: int
    num_bytes: int


class InProcessTransport:
    """`kv_transfer.transport.Transport` on an `InProcessFabric`, which makes it."""

    def __init__(self, fabric: InProcessFabric, port: Port) -> None:
        self._fabric = fabric
        self._port = port
        self._region: MemoryRegion | None = None
        self._peers: dict[PeerName, _Metadata] = {}
        self._generations: dict[PeerName, int] = {}
        self._writes: dict[WriteHandle, Write] = {}

    @property
    def name(self) -> PeerName:
        """This side's agent name."""
        return self._port.name

    def register(self, region: MemoryRegion) -> None:
        """Register the region where it is now; what was registered before can still be hit by
        writes under way."""
        with self._fabric.lock:
            self._region = region
            self._port.registrations.append(Registration(region.address, region.view()))

    def metadata(self) -> bytes:
        """Return the agent's life and registered range as JSON."""
        if self._region is None:
            msg = "metadata before register"
            raise FabricError(msg)
        port, current = self._port, self._port.registrations[-1]
        return msgspec.json.encode(
            _Metadata(port.name, port.life, current.address, len(current.memory))
        )

    def add_peer(self, name: PeerName, metadata: bytes) -> None:
        """Learn or replace a peer."""
        try:
            peer = msgspec.json.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            msg = f"metadata of {name!r} is not understood: {error}"
            raise FabricError(msg) from error
        if peer.name != name:
            msg = f"metadata of {peer.name!r} was given for {name!r}"
            raise FabricError(msg)
        self._peers[name] = peer

    def remove_peer(self, name: PeerName) -> None:
        """Forget a peer."""
        self._peers.pop(name, None)
        self._generations.pop(name, None)

    def write(
        self, remote: RemoteRegion, local: Sequence[Span], target: Sequence[Span], tag: bytes
    ) -> WriteHandle:
        """Post a write.

        Raises:
            ValueError: a span lies outside its region.
            FabricError: nothing is registered here, or the agent is closed.
        """
        if self._region is None or not self._port.is_alive:
            msg = "write before register, or after close"
            raise FabricError(msg)
        check_bounds(local, self._region.num_bytes, "local")
        check_bounds(target, remote.num_bytes, "target")
        with self._fabric.lock:
            obstacle = self._obstacle(remote, target)
            if obstacle is not None:
                write = self._fabric.unposted(self._port, remote.peer, obstacle)
            else:
                memory = self._port.registrations[-1].memory
                spans = [
                    (
                        memory[here.offset : here.offset + here.num_bytes],
                        remote.address + there.offset,
                    )
                    for here, there in zip(local, target, strict=True)
                ]
                write = self._fabric.post(self._port, remote.peer, tag, spans)
            self._writes[write.handle] = write
        return write.handle

    def poll(self, handle: WriteHandle) -> Poll:
        """Return a write's state."""
        with self._fabric.lock:
            self._fabric.step()
            poll = self._writes[handle].poll
            if poll.state is not WriteState.PENDING:
                del self._writes[handle]
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
        self._writes.clear()

    def _obstacle(self, remote: RemoteRegion, target: Sequence[Span]) -> Poll | None:
        """Return how a write ends that cannot start, as it would over NIXL; None if it can."""
        peer = self._peers.get(remote.peer)
        if peer is None:
            return Poll(WriteState.REFUSED, f"unknown peer {remote.peer!r}")
        newest = self._generations.setdefault(remote.peer, remote.generation)
        if remote.generation < newest:
            return Poll(WriteState.REFUSED, f"stale region generation {remote.generation}")
        self._generations[remote.peer] = remote.generation
        if not self._fabric.is_alive(peer.name, peer.life):
            return Poll(WriteState.FAILED, "RemoteDisconnect: the peer is gone")
        for span in target:
            offset = remote.address + span.offset - peer.address
            if offset < 0 or offset + span.num_bytes > peer.num_bytes:
                reason = "NotFound: the address is not in the peer's metadata"
                return Poll(WriteState.FAILED, reason)
        return None
