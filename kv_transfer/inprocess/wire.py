"""One step in the life of a write or read: what lands, what is lost, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from kv_transfer.inprocess.model import (
    Dice,
    FabricEvent,
    Faults,
    Frozen,
    Kind,
    Port,
    Read,
    Step,
    Write,
)
from kv_transfer.transport import Notification, PeerName, Poll, TransferState

_GONE = Poll(TransferState.FAILED, "RemoteDisconnect: the peer is gone")


class Wire:
    """What is between the ports: the faults, the partitions, and who is told what happens.

    Args:
        rng, on_event: see `InProcessFabric`.
    """

    def __init__(
        self, rng: Dice, faults: Faults, on_event: Callable[[FabricEvent], None] | None
    ) -> None:
        self.faults = faults
        self.cut: set[tuple[PeerName, PeerName]] = set()
        self._rng = rng
        self._on_event = on_event

    def is_stalled(self, write: Write) -> bool:
        """Return whether the next step waits for a thaw, or for a partition to heal."""
        source, target = write.source, write.target
        if Frozen.ALL in (source.frozen, target.frozen):
            return True
        if write.step is Step.COMPLETE:
            return write.poster.frozen is not None or self._is_cut(write.peer, write.poster)
        if write.step is Step.NOTIFY and source.frozen is not None:
            return True  # the writer's software sends it
        if isinstance(write, Read) and self._is_cut(target, source):
            return True  # the next piece is asked for
        return self._is_cut(source, target)

    def advance(self, write: Write, at: float) -> bool:
        """Take the next step; return whether there is one after it."""
        if not write.poster.is_alive:
            return self._advance_buffered(write, at)
        if write.peer.is_alive:
            self._take_step(write, at)
        else:
            self.end(write, at, _GONE)
        return write.poll.state is TransferState.PENDING

    def end(self, write: Write, at: float, poll: Poll) -> None:
        """Let a write or read end that will not be DONE."""
        write.poll = poll
        self.tell(write, Kind.REFUSED if poll.state is TransferState.REFUSED else Kind.FAILED, at)

    def tell(self, write: Write, kind: Kind, at: float, index: int = -1) -> None:
        """Tell who listens what happened."""
        if self._on_event is not None:
            source, target = write.source.name, write.target.name
            self._on_event(FabricEvent(at, kind, source, target, write.handle, index))

    def _is_cut(self, source: Port, target: Port) -> bool:
        return (source.name, target.name) in self.cut

    def _advance_buffered(self, write: Write, at: float) -> bool:
        """Land what a dead writer's kernel had buffered; the rest never leaves. A dead reader has
        no memory to land in."""
        if isinstance(write, Read) or not write.target.is_alive:
            return False
        if write.step is Step.LAND and write.captured:
            self._land(write, write.captured.pop(0), at)
        elif write.step is Step.NOTIFY and write.carries_notification:
            self._notify(write, at)
        else:
            return False
        return write.poll.state is TransferState.PENDING

    def _take_step(self, write: Write, at: float) -> None:
        match write.step:
            case Step.LAND:
                self._land(write, bytes(write.descriptors[0].source), at)
            case Step.NOTIFY:
                self._notify(write, at)
            case Step.VERIFY:
                self._verify(write, at)
            case Step.COMPLETE:
                write.poll = Poll(TransferState.DONE)
                self.tell(write, Kind.DONE, at)
            case _:
                assert_never(write.step)

    def _land(self, write: Write, data: bytes, at: float) -> None:
        descriptor = write.descriptors.pop(0)
        memory = write.target.memory_at(descriptor.address, len(data))
        if memory is None:
            reason = "InvalidParam: the address was never registered"
            self.end(write, at, Poll(TransferState.FAILED, reason))
            return
        if self._rng.random() < self.faults.loss:
            self.end(write, at, Poll(TransferState.FAILED, "Backend: a descriptor was lost"))
            return
        kind = Kind.LANDED
        if self._rng.random() < self.faults.corruption:
            data, kind = self._corrupted(data), Kind.CORRUPTED
        memory[:] = data
        self.tell(write, kind, at, descriptor.index)
        if not write.descriptors:
            write.step = write.next_step

    def _corrupted(self, data: bytes) -> bytes:
        index = self._rng.randrange(len(data))
        return data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :]

    def _notify(self, write: Write, at: float) -> None:
        write.step = Step.COMPLETE
        if self._rng.random() < self.faults.notification_loss:
            self.tell(write, Kind.NOTIFICATION_LOST, at)
            return
        write.target.arrived.append(Notification(write.source.name, write.tag))
        self.tell(write, Kind.NOTIFIED, at)

    def _verify(self, write: Write, at: float) -> None:
        assert isinstance(write, Read)
        write.step = Step.COMPLETE
        reason = write.verify()
        if reason:
            self.end(write, at, Poll(TransferState.REFUSED, reason))
