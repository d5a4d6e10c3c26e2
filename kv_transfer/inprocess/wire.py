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
    Transfer,
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

    def is_stalled(self, transfer: Transfer) -> bool:
        """Return whether the next step waits for a thaw, or for a partition to heal."""
        source, target = transfer.source, transfer.target
        if Frozen.ALL in (source.frozen, target.frozen):
            return True
        if transfer.step is Step.COMPLETE:
            return transfer.poster.frozen is not None or self._is_cut(
                transfer.peer, transfer.poster
            )
        if transfer.step is Step.NOTIFY and source.frozen is not None:
            return True  # the writer's software sends it
        if isinstance(transfer, Read) and self._is_cut(target, source):
            return True  # the next piece is asked for
        return self._is_cut(source, target)

    def advance(self, transfer: Transfer, at: float) -> bool:
        """Take the next step; return whether there is one after it."""
        if not transfer.poster.is_alive:
            return self._advance_buffered(transfer, at)
        if transfer.peer.is_alive:
            self._take_step(transfer, at)
        else:
            self.end(transfer, at, _GONE)
        return transfer.poll.state is TransferState.PENDING

    def end(self, transfer: Transfer, at: float, poll: Poll) -> None:
        """Let a write or read end that will not be DONE."""
        transfer.poll = poll
        self.tell(
            transfer, Kind.REFUSED if poll.state is TransferState.REFUSED else Kind.FAILED, at
        )

    def tell(self, transfer: Transfer, kind: Kind, at: float, index: int = -1) -> None:
        """Tell who listens what happened."""
        if self._on_event is not None:
            source, target = transfer.source.name, transfer.target.name
            self._on_event(FabricEvent(at, kind, source, target, transfer.handle, index))

    def _is_cut(self, source: Port, target: Port) -> bool:
        return (source.name, target.name) in self.cut

    def _advance_buffered(self, transfer: Transfer, at: float) -> bool:
        """Land what a dead writer's kernel had buffered; the rest never leaves. A dead reader has
        no memory to land in."""
        if not isinstance(transfer, Write) or not transfer.target.is_alive:
            return False
        if transfer.step is Step.LAND and transfer.captured:
            self._land(transfer, transfer.captured.pop(0), at)
        elif transfer.step is Step.NOTIFY and transfer.carries_notification:
            self._notify(transfer, at)
        else:
            return False
        return transfer.poll.state is TransferState.PENDING

    def _take_step(self, transfer: Transfer, at: float) -> None:
        match transfer.step:
            case Step.LAND:
                self._land(transfer, bytes(transfer.descriptors[0].source), at)
            case Step.NOTIFY:
                self._notify(transfer, at)
            case Step.VERIFY:
                self._verify(transfer, at)
            case Step.COMPLETE:
                transfer.poll = Poll(TransferState.DONE)
                self.tell(transfer, Kind.DONE, at)
            case _:
                assert_never(transfer.step)

    def _land(self, transfer: Transfer, data: bytes, at: float) -> None:
        descriptor = transfer.descriptors.pop(0)
        memory = transfer.target.memory_at(descriptor.address, len(data))
        if memory is None:
            reason = "InvalidParam: the address was never registered"
            self.end(transfer, at, Poll(TransferState.FAILED, reason))
            return
        if self._rng.random() < self.faults.loss:
            self.end(transfer, at, Poll(TransferState.FAILED, "Backend: a descriptor was lost"))
            return
        kind = Kind.LANDED
        if self._rng.random() < self.faults.corruption:
            data, kind = self._corrupted(data), Kind.CORRUPTED
        memory[:] = data
        self.tell(transfer, kind, at, descriptor.index)
        if not transfer.descriptors:
            transfer.step = transfer.next_step

    def _corrupted(self, data: bytes) -> bytes:
        index = self._rng.randrange(len(data))
        return data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :]

    def _notify(self, transfer: Transfer, at: float) -> None:
        assert isinstance(transfer, Write)
        transfer.step = Step.COMPLETE
        if self._rng.random() < self.faults.notification_loss:
            self.tell(transfer, Kind.NOTIFICATION_LOST, at)
            return
        transfer.target.arrived.append(Notification(transfer.source.name, transfer.tag))
        self.tell(transfer, Kind.NOTIFIED, at)

    def _verify(self, transfer: Transfer, at: float) -> None:
        assert isinstance(transfer, Read)
        transfer.step = Step.COMPLETE
        reason = transfer.verify()
        if reason:
            self.end(transfer, at, Poll(TransferState.REFUSED, reason))
