"""A simulated process: what runs in its context stands still with it and dies with it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Protocol


class Lane(enum.Enum):
    """What of a process wakes up at its own pace after a freeze; each keeps its order.

    LOOP     its event loop: callbacks, timers
    MESSAGE  what its sockets bring
    ENGINE   the engine's thread
    FABRIC   the fabric's thread
    """

    LOOP = "loop"
    MESSAGE = "message"
    ENGINE = "engine"
    FABRIC = "fabric"


class Event(Protocol):
    """What a loop runs, as far as a process that stands still must know it."""

    @property
    def lane(self) -> Lane:
        """Which part of the process it belongs to."""
        ...


class State(enum.Enum):
    """Of a process."""

    RUNNING = "running"
    FROZEN = "frozen"
    DEAD = "dead"


class Process:
    """One life of one process.

    Attributes:
        name: stable over restarts; `life` counts from 1.
        context: callbacks that run in it, or in a copy of it, are the process's.
        parked: events that came due while it stood still, in order.
        stopped_at, resumed_at: virtual seconds of the last freeze or death, and of the last thaw.
        clock_offset: of its monotonic clock, which compares with no other's.
    """

    def __init__(self, name: str, life: int, *, clock_offset: float) -> None:
        self.name = name
        self.life = life
        self.clock_offset = clock_offset
        self.state = State.RUNNING
        self.parked: list[Event] = []
        self.stopped_at = 0.0
        self.resumed_at = 0.0
        self.context: Context = copy_context()
        self.context.run(CURRENT.set, self)

    def __str__(self) -> str:
        return f"{self.name}.{self.life}"

    @property
    def is_running(self) -> bool:
        """Whether its events happen."""
        return self.state is State.RUNNING

    @property
    def is_alive(self) -> bool:
        """Whether it may run again."""
        return self.state is not State.DEAD


CURRENT: ContextVar[Process | None] = ContextVar("simulated process", default=None)
"""Whose code runs; None: the world's (network, hardware, whoever injects faults)."""


class ProcessClock:
    """A process's monotonic clock: virtual time, shifted by the process's own offset."""

    def __init__(self, time: Callable[[], float], process: Process) -> None:
        self._time = time
        self._offset = process.clock_offset

    def now(self) -> float:
        """Return the process's monotonic seconds."""
        return self._time() + self._offset

    def wall(self) -> float:
        """Return the seconds of virtual time."""
        return self._time()
