"""What the in-process fabric is made of: faults, events, ports and the transfers between them."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import msgspec

from kv_transfer.transport import Notification, PeerName, Poll, TransferHandle, TransferState


class Dice(Protocol):
    """What is drawn from; `random.Random` is one. The fabric owns none."""

    def random(self) -> float:
        """Return a float of [0, 1)."""
        ...

    def uniform(self, a: float, b: float, /) -> float:
        """Return a float of [a, b]."""
        ...

    def randrange(self, stop: int, /) -> int:
        """Return a whole number of [0, stop)."""
        ...

    def shuffle(self, x: list[Descriptor], /) -> None:
        """Put `x` into a drawn order."""
        ...


class Faults(msgspec.Struct, frozen=True):
    """What the fabric does to every write and read. Shares are probabilities from 0 to 1.

    Attributes:
        min_delay_s, max_delay_s: between a transfer's events, uniform.
        loss: a descriptor is lost: the transfer FAILs, and has no notification.
        notification_loss: the bytes are in and the writer sees DONE; the target never hears of it.
        corruption: one byte of a descriptor lands inverted, and nobody is told.
    """

    min_delay_s: float = 0.0
    max_delay_s: float = 0.0
    loss: float = 0.0
    notification_loss: float = 0.0
    corruption: float = 0.0


class Frozen(enum.Enum):
    """How a peer stands still; in both ways its own process does nothing."""

    PROCESS = "process"
    """Hardware goes on moving bytes to it and from it (RDMA)."""
    ALL = "all"
    """No byte of it moves; what was under way lands after the thaw (TCP)."""


class Kind(enum.StrEnum):
    """Events of a write's or read's life."""

    POSTED = "posted"
    LANDED = "landed"
    CORRUPTED = "corrupted"
    NOTIFIED = "notified"
    NOTIFICATION_LOST = "notification_lost"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"


class FabricEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a write or read.

    Attributes:
        source, target: where the bytes come from and go to; a read's target posted it.
        index: which descriptor, as posted; -1 where the event is about all of it.
    """

    at: float
    kind: Kind
    source: PeerName
    target: PeerName
    handle: TransferHandle
    index: int = -1


class Registration(msgspec.Struct):
    """Memory as it was when registered: a fence moves the data away from under it."""

    address: int
    memory: memoryview


class Port:
    """One agent's end of the fabric. `life` tells agents of one name apart."""

    def __init__(self, name: PeerName, life: int) -> None:
        self.name = name
        self.life = life
        self.is_alive = True
        self.frozen: Frozen | None = None
        self.registrations: list[Registration] = []
        self.arrived: list[Notification] = []

    def memory_at(self, address: int, num_bytes: int) -> memoryview | None:
        """Return the memory last registered at an address; deregistering stops no late write."""
        for registration in reversed(self.registrations):
            offset = address - registration.address
            if offset >= 0 and offset + num_bytes <= len(registration.memory):
                return registration.memory[offset : offset + num_bytes]
        return None


class Step(enum.Enum):
    """What is next in a write's or read's life."""

    LAND = "land"
    NOTIFY = "notify"
    VERIFY = "verify"
    COMPLETE = "complete"


class Transfer(ABC):
    """A write or read under way: descriptors in the order in which they will land, then the rest.

    Attributes:
        next_step: after the last descriptor.
    """

    next_step: Step

    def __init__(self, handle: TransferHandle, source: Port, target: Port) -> None:
        self.handle = handle
        self.source = source
        self.target = target
        self.poll = Poll(TransferState.PENDING)
        self.descriptors: list[Descriptor] = []
        self.step = Step.LAND

    @property
    @abstractmethod
    def poster(self) -> Port:
        """Who posted it, and polls it."""

    @property
    @abstractmethod
    def peer(self) -> Port:
        """The other end."""


class Write(Transfer):
    """Posted by the source.

    Attributes:
        captured: bytes of the next descriptors that had left the source when it was killed.
        carries_notification: whether that had left too.
    """

    next_step = Step.NOTIFY

    def __init__(self, handle: TransferHandle, source: Port, target: Port, tag: bytes) -> None:
        super().__init__(handle, source, target)
        self.tag = tag
        self.captured: list[bytes] = []
        self.carries_notification = False

    @property
    def poster(self) -> Port:
        """The source."""
        return self.source

    @property
    def peer(self) -> Port:
        """The target."""
        return self.target

    def capture(self, num_descriptors: int) -> None:
        """Keep what the source's kernel had buffered: the next descriptors as they are now, and
        the notification behind them where there is room."""
        pending = self.descriptors[:num_descriptors]
        self.captured = [bytes(descriptor.source) for descriptor in pending]
        self.carries_notification = num_descriptors > len(self.descriptors)


class Read(Transfer):
    """Posted by the target, with a look in the notification's place.

    Attributes:
        verify: says why what has landed is not the source's; empty where it is.
    """

    next_step = Step.VERIFY

    def __init__(
        self, handle: TransferHandle, source: Port, target: Port, verify: Callable[[], str]
    ) -> None:
        super().__init__(handle, source, target)
        self.verify = verify

    @property
    def poster(self) -> Port:
        """The target."""
        return self.target

    @property
    def peer(self) -> Port:
        """The source."""
        return self.source


class Descriptor(msgspec.Struct):
    """One run of bytes: where they are read, and the address that they land at."""

    index: int
    source: memoryview
    address: int
