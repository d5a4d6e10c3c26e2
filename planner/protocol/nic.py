"""The hardware between workers: the in-process fabric's events on the simulation's heap.

It moves bytes also for processes that stand still. Beyond what `InProcessFabric` does, a write that
FAILED may land all the same, later; and, where `must_poll`, bytes arrive only while their target
polls the fabric (as with UCX over TCP), so that a write stays pending at its writer until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from core.messages import WriteNotification
from kv_transfer.inprocess.model import Dice, FabricEvent, Faults, Frozen, Kind
from kv_transfer.inprocess.transport import InProcessFabric, InProcessTransport
from kv_transfer.transport import PeerName, RemoteRegion, Span, TransferHandle
from planner.protocol.event_log import EventLog
from planner.protocol.process import Process
from planner.protocol.region import SimRegion
from planner.protocol.virtual_loop import Entry, VirtualLoop

_notifications = msgspec.msgpack.Decoder(WriteNotification)


class Agent(Protocol):
    """A worker as the hardware knows it; `worker.Worker`."""

    @property
    def process(self) -> Process:
        """Its process."""
        ...

    @property
    def region(self) -> SimRegion:
        """Its memory."""
        ...

    @property
    def block_bytes(self) -> int:
        """Size of its blocks."""
        ...

    @property
    def is_polling(self) -> bool:
        """Whether it looks at the fabric."""
        ...

    def fabric_has_news(self) -> None:
        """Something arrived or ended."""
        ...


class PostedWrite(msgspec.Struct, eq=False):
    """A write as its writer posted it.

    Attributes:
        source: who posted it.
        missing: which spans have not landed.
        is_cut: its agent was destroyed: it reads nothing any more.
    """

    source: PeerName
    note: WriteNotification
    remote: RemoteRegion
    local: Sequence[Span]
    target: Sequence[Span]
    missing: set[int]
    is_cut: bool = False


OnLanded = Callable[[PostedWrite, int], None]
"""Called when span `index` of a write has just landed."""


class _Fabric(InProcessFabric):
    """An agent that is destroyed has buffers in the kernel, too."""

    dice: Dice

    def kill(self, name: PeerName, *, buffered_descriptors: int | None = None) -> None:
        """End a peer; what was buffered of its writes lands yet."""
        if buffered_descriptors is None:
            buffered_descriptors = self.dice.randrange(3)
        super().kill(name, buffered_descriptors=buffered_descriptors)


class Nic:
    """All agents, and the one fabric that they share."""

    def __init__(
        self,
        *,
        loop: VirtualLoop,
        dice: Dice,
        log: EventLog,
        faults: Faults,
        must_poll: bool,
        on_landed: OnLanded,
    ) -> None:
        self._loop = loop
        self._dice = dice
        self._log = log
        self._must_poll = must_poll
        self._on_landed = on_landed
        self._agents: dict[PeerName, Agent] = {}
        self._writes: dict[TransferHandle, PostedWrite] = {}
        self._partitions: set[tuple[str, str]] = set()
        self._cut: set[tuple[PeerName, PeerName]] = set()
        self._pending: Entry | None = None
        self.fabric = _Fabric(now=loop.time, rng=dice, faults=faults, on_event=self._happened)
        self.fabric.dice = dice

    def attach(self, name: PeerName, agent: Agent) -> None:
        """A process has an agent of this name from now on."""
        self._agents[name] = agent
        self._route()

    def agent(self, name: PeerName) -> Agent:
        """Return who has an agent's name."""
        return self._agents[name]

    def transport(self, name: PeerName) -> InProcessTransport:
        """Return a new agent for a process; what an earlier one posted reads nothing any more."""
        for write in self._writes.values():
            write.is_cut = write.is_cut or write.source == name
        return self.fabric.transport(name)

    # --- what drivers tell ------------------------------------------------------------------------

    def posted(
        self,
        source: PeerName,
        handle: TransferHandle,
        remote: RemoteRegion,
        local: Sequence[Span],
        target: Sequence[Span],
        tag: bytes,
    ) -> None:
        """A write was posted."""
        note = _notifications.decode(tag)
        self._writes[handle] = PostedWrite(
            source, note, remote, local, target, set(range(len(target)))
        )
        self.poke()

    def poke(self) -> None:
        """Have the fabric step when its next event is due."""
        due = self.fabric.next_at()
        if due is None:
            return
        if self._pending is not None:
            if self._pending.when() <= due:
                return
            self._pending.cancel()
        self._pending = self._loop.call_world(due, self._step)

    def polling_changed(self) -> None:
        """A process began or stopped to poll."""
        if self._must_poll:
            self._route()

    # --- faults -----------------------------------------------------------------------------------

    def freeze(self, name: PeerName, how: Frozen) -> None:
        """A process stands still; one that has no agent yet has nothing to stop."""
        if name in self._agents:
            self.fabric.freeze(name, how)

    def thaw(self, name: PeerName) -> None:
        """It goes on."""
        if name in self._agents:
            self.fabric.thaw(name)
            self.poke()

    def kill(self, name: PeerName, *, buffered_descriptors: int) -> None:
        """It died; what its kernel had buffered lands yet."""
        if name not in self._agents:
            return
        self.fabric.kill(name, buffered_descriptors=buffered_descriptors)
        for write in self._writes.values():
            write.is_cut = write.is_cut or write.source == name
        self.poke()

    def cut(self, source: str, target: str) -> None:
        """Stop what goes from one process to another; by their names."""
        self._partitions.add((source, target))
        self._route()

    def heal(self, source: str, target: str) -> None:
        """Undo `cut`."""
        self._partitions.discard((source, target))
        self._route()

    def _route(self) -> None:
        """Cut and heal pairs of agents as partitions and polling want it."""
        alive = [(name, agent) for name, agent in self._agents.items() if agent.process.is_alive]
        wanted = {
            (source, target)
            for source, sender in alive
            for target, receiver in alive
            if (sender.process.name, receiver.process.name) in self._partitions
            or (self._must_poll and not receiver.is_polling)
        }
        for pair in sorted(wanted - self._cut):
            self.fabric.cut(*pair)
        for pair in sorted(self._cut - wanted):
            self.fabric.heal(*pair)
        self._cut = wanted
        self.poke()

    # --- events -----------------------------------------------------------------------------------

    def _step(self) -> None:
        self._pending = None
        self.fabric.step()
        self.poke()

    def _happened(self, event: FabricEvent) -> None:
        source = self._agents.get(event.source)
        self._log.add("fabric", event.kind.value, event)
        write = self._writes.get(event.handle)
        if event.kind is Kind.LANDED and write is not None:
            write.missing.discard(event.index)
            self._on_landed(write, event.index)
        elif event.kind is Kind.NOTIFIED:
            self._agents[event.target].fabric_has_news()
        elif event.kind in (Kind.DONE, Kind.FAILED):
            if event.kind is Kind.FAILED and write is not None:
                self._land_late(write)
            if source is not None:
                source.fabric_has_news()

    # --- writes that failed -----------------------------------------------------------------------

    def _land_late(self, write: PostedWrite) -> None:
        """A failed write's spans may be under way still."""
        for index in sorted(write.missing):
            if self._dice.random() < 0.5:
                at = self._loop.time() + self._dice.uniform(0.0, 0.5)
                self._loop.call_world(at, self._land, write, index)

    def _land(self, write: PostedWrite, index: int) -> None:
        source, target = self._agents[write.source], self._agents.get(write.remote.peer)
        if write.is_cut or target is None or not target.process.is_alive:
            return
        here, there = write.local[index], write.target[index]
        memory = target.region.memory_at(write.remote.address)
        if memory is not None:
            data = source.region.view()[here.offset : here.offset + here.num_bytes]
            memory[there.offset : there.offset + there.num_bytes] = data
        self._log.add("fabric", "landed after its failure", write.note)
        write.missing.discard(index)
        self._on_landed(write, index)
