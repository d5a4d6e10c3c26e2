"""The backends of the transport suite, and what can be done to their agents alike."""

from __future__ import annotations

import enum
import random
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import pytest

from core.clock import ManualClock
from kv_transfer.bytes_region import BytesRegion
from kv_transfer.inprocess.model import Faults, Frozen
from kv_transfer.inprocess.transport import InProcessFabric
from kv_transfer.transport import Poll, Span, TransferState
from tests.fabric_agents import Agent, RemoteAgent, wait_until

NUM_BLOCKS = 64
TRIGGER_BLOCK = 8
"""A strike comes when a byte of this block has landed."""

_EVENT_S = 0.001


class Backend(enum.StrEnum):
    """Every transport that there is, as it is driven here."""

    INPROCESS = "inprocess"
    CMA = "nixl_cma"
    TCP = "nixl_tcp"


class Deed(enum.Enum):
    """What is done to a process in mid-transfer."""

    FREEZE = signal.SIGSTOP
    KILL = signal.SIGKILL


def backends(without: Mapping[Backend, str]) -> Callable[..., Any]:
    """Return the parametrization of a case that some backends cannot have, with the reasons."""
    params = [
        pytest.param(backend, marks=pytest.mark.skip(reason=without[backend]))
        if backend in without
        else backend
        for backend in Backend
    ]
    return pytest.mark.parametrize("fleet", params, indirect=True, scope="module")


class Fleet(Protocol):
    """Agents over one backend. An agent is an `Agent`, or a `RemoteAgent` that has its methods.

    Attributes:
        block_bytes: a region is NUM_BLOCKS of them.
    """

    backend: Backend
    block_bytes: int

    def start(self, name: str) -> Any:
        """Return a new agent, full of zeros."""
        ...

    def kill(self, agent: Any) -> None:
        """End an agent's process."""
        ...

    def strike(self, deed: Deed, victim: Any, *, when: int, lands_at: Any) -> None:
        """Have something done to `victim` when the byte `when` has landed in TRIGGER_BLOCK of
        `lands_at`, where no other block need have it yet."""
        ...

    def await_strike(self, deed: Deed, victim: Any) -> None:
        """Wait until it was done."""
        ...

    def freeze(self, victim: Any) -> None:
        """Stop an agent; no method of it may be called."""
        ...

    def thaw(self, victim: Any) -> None:
        """Let a frozen agent go on."""
        ...


class InProcessFleet:
    """One fabric in this process. Its clock runs as it is looked at: an event a look where a strike
    is waited for, else many."""

    backend = Backend.INPROCESS

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._clock = ManualClock()
        self._step_s = 1000 * _EVENT_S
        self._lock = threading.RLock()
        self._fabric = InProcessFabric(
            now=self._look,
            rng=random.Random(7),
            faults=Faults(min_delay_s=_EVENT_S, max_delay_s=_EVENT_S),
            lock=self._lock,
        )
        self._trigger: Callable[[], bool] = lambda: True

    def start(self, name: str) -> LocalAgent:
        """Return a new agent."""
        return LocalAgent(name, self._fabric.transport, BytesRegion(NUM_BLOCKS * self.block_bytes))

    def kill(self, agent: LocalAgent) -> None:
        """End it; three descriptors of each of its writes are in the kernel's buffers."""
        self._fabric.kill(agent.transport.name, buffered_descriptors=3)
        agent.is_dead = True

    def strike(self, deed: Deed, victim: LocalAgent, *, when: int, lands_at: LocalAgent) -> None:
        """See `Fleet`."""
        self._step_s = _EVENT_S
        offset = TRIGGER_BLOCK * self.block_bytes
        view = lands_at.region.view()
        self._trigger = lambda: view[offset] == when

    def await_strike(self, deed: Deed, victim: LocalAgent) -> None:
        """See `Fleet`."""

        def is_due() -> bool:
            self._fabric.step()
            return self._trigger()

        wait_until(is_due, "the byte that triggers")
        self._step_s = 1000 * _EVENT_S
        if deed is Deed.KILL:
            self.kill(victim)
        else:
            self.freeze(victim)

    def freeze(self, victim: LocalAgent) -> None:
        """Stop it and all bytes of it, as over TCP."""
        self._fabric.freeze(victim.transport.name, Frozen.ALL)

    def thaw(self, victim: LocalAgent) -> None:
        """Let a frozen agent go on."""
        self._fabric.thaw(victim.transport.name)

    def _look(self) -> float:
        self._clock.advance(self._step_s)
        return self._clock.now()


class LocalAgent(Agent):
    """An `Agent` with the ways of a `RemoteAgent`."""

    is_dead = False
    _result: Any = None

    def start(self, method: str, *args: Any) -> None:
        """Call a method."""
        self._result = getattr(self, method)(*args)

    def finish(self, method: str) -> Any:
        """Return its result."""
        return self._result


class NixlFleet:
    """A process for each agent."""

    def __init__(self, backend: Backend, block_bytes: int, stack: ExitStack) -> None:
        self.backend = backend
        self.block_bytes = block_bytes
        self._stack = stack
        self._env = {"UCX_TLS": "tcp"} if backend is Backend.TCP else {}
        self._spares = [self._spawn(), self._spawn()]

    def start(self, name: str) -> RemoteAgent:
        """Return a new agent, in a process that has been waiting for a name."""
        agent = self._spares.pop(0)
        agent.become(name)
        self._spares.append(self._spawn())
        return agent

    def kill(self, agent: RemoteAgent) -> None:
        """End its process."""
        agent.kill()

    def strike(self, deed: Deed, victim: RemoteAgent, *, when: int, lands_at: RemoteAgent) -> None:
        """See `Fleet`."""
        offset = TRIGGER_BLOCK * self.block_bytes
        lands_at.signal_when_landed(when, offset, victim.pid, deed.value)

    def await_strike(self, deed: Deed, victim: RemoteAgent) -> None:
        """See `Fleet`."""
        if deed is Deed.KILL:
            wait_until(lambda: victim.is_dead, "the process to die")
        else:
            wait_until(victim.is_stopped, "the process to stop")

    def freeze(self, victim: RemoteAgent) -> None:
        """Stop its process."""
        victim.freeze()

    def thaw(self, victim: RemoteAgent) -> None:
        """Let a frozen process go on."""
        victim.thaw()

    def _spawn(self) -> RemoteAgent:
        agent = RemoteAgent(None, num_bytes=NUM_BLOCKS * self.block_bytes, env=self._env)
        self._stack.callback(agent.end)
        return agent


@contextmanager
def open_fleet(backend: Backend, *, block_bytes: int) -> Generator[Fleet]:
    """Yield a fleet; its processes end with it.

    Args:
        block_bytes: of the regions on NIXL. In this process blocks have 16 KiB, for each is copied
            as one.
    """
    with ExitStack() as stack:
        if backend is Backend.INPROCESS:
            yield InProcessFleet(16 << 10)
        else:
            yield NixlFleet(backend, block_bytes, stack)


class Pair:
    """A writer and a target that know each other, for cases to share: who died is replaced."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._num_boots = 0
        self._writer: Any = None
        self._target: Any = None

    def get(self) -> tuple[Any, Any]:
        """Return both, alive and connected."""
        self._writer = self._living(self._writer, "writer")
        self._target = self._living(self._target, "target")
        self._writer.add_peer(self._target.introduce())
        self._target.add_peer(self._writer.introduce())
        return self._writer, self._target

    def _living(self, agent: Any, worker_id: str) -> Any:
        if agent is not None and not agent.is_dead:
            return agent
        self._num_boots += 1
        return self._fleet.start(f"{worker_id}@{self._num_boots}")


def end_of(agent: Any, handle: int) -> Poll:
    """Poll a write or read to its end."""
    polls: list[Poll] = []

    def has_ended() -> bool:
        polls.append(agent.poll(handle))
        return polls[-1].state is not TransferState.PENDING

    wait_until(has_ended, "the end of a write or read")
    return polls[-1]


def blocks(fleet: Fleet, first: int = 0, count: int = NUM_BLOCKS) -> list[Span]:
    """Return one span a block."""
    size = fleet.block_bytes
    return [Span(index * size, size) for index in range(first, first + count)]


def write_all(fleet: Fleet, writer: Any, target: Any, tag: bytes) -> Poll:
    """Write all blocks and return how that ended."""
    everything = blocks(fleet)
    return end_of(writer, writer.write(target.introduce().region, everything, everything, tag))


def read_all(fleet: Fleet, reader: Any, source: Any) -> Poll:
    """Read all blocks and return how that ended."""
    everything = blocks(fleet)
    return end_of(reader, reader.read(source.introduce().region, everything, everything))
