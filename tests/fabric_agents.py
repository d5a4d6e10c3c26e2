"""Agents that the transport suite drives alike: in this process, or one real process each.

Run as a program it is such a process: it takes its name first, then requests on standard input;
answers go to standard output, and between them it polls its transport, as a worker does.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from core.environment import child_environment
from core.errors import FabricError
from core.ids import Boot
from kv_transfer.bytes_region import BytesRegion
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.region import HostRegion
from kv_transfer.transport import PeerName, Poll, RemoteRegion, Span, TransferHandle, Transport
from kv_transfer.transport import TransferState as State

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 30.0
MIXED = -1
"""What `Agent.blocks` says of a block that holds different bytes."""


class Introduction(msgspec.Struct):
    """What a writer or reader must know of a peer."""

    region: RemoteRegion
    metadata: bytes


class Job(msgspec.Struct):
    """One write."""

    local: list[Span]
    target: list[Span]
    tag: bytes


class Agent:
    """A transport and its one region, in this process.

    Args:
        make: makes a transport by name; called once, and for a second posting thread.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[PeerName], Transport],
        region: HostRegion | BytesRegion,
    ) -> None:
        self.transport = make(PeerName(name))
        self.region = region
        self._make = make
        self._received: list[bytes] = []
        self._is_polling = True
        self.transport.register(region)

    # --- the transport's own calls ----------------------------------------------------------------

    def introduce(self) -> Introduction:
        name, region = self.transport.name, self.region
        boot = Boot(name.partition("@")[2])
        remote = RemoteRegion(name, boot, region.address, region.num_bytes, region.generation)
        return Introduction(remote, self.transport.metadata())

    def add_peer(self, introduction: Introduction) -> None:
        self.transport.add_peer(introduction.region.peer, introduction.metadata)

    def refused_peer(self, name: PeerName, metadata: bytes) -> str:
        """Return why a peer was refused."""
        try:
            self.transport.add_peer(name, metadata)
        except FabricError as error:
            return str(error)
        return ""

    def remove_peer(self, name: PeerName) -> None:
        self.transport.remove_peer(name)

    def write(
        self, remote: RemoteRegion, local: list[Span], target: list[Span], tag: bytes
    ) -> TransferHandle:
        return self.transport.write(remote, local, target, tag)

    def read(self, remote: RemoteRegion, local: list[Span], source: list[Span]) -> TransferHandle:
        return self.transport.read(remote, local, source)

    def poll(self, handle: TransferHandle) -> Poll:
        return self.transport.poll(handle)

    def received(self) -> list[bytes]:
        """Return all tags so far."""
        self.progress()
        return self._received

    def health(self) -> str:
        return self.transport.health().transport

    def close(self) -> None:
        self._is_polling = False
        self.transport.close()

    def checksum_of(self, spans: list[Span]) -> int:
        return self.transport.checksum(spans)

    # --- its memory -------------------------------------------------------------------------------

    def fill(self, byte: int, offset: int = 0, num_bytes: int = 0) -> None:
        size = num_bytes or self.region.num_bytes
        self.region.view()[offset : offset + size] = bytes([byte]) * size

    def put(self, offset: int, data: bytes) -> None:
        self.region.view()[offset : offset + len(data)] = data

    def peek(self, offset: int, num_bytes: int) -> bytes:
        return bytes(self.region.view()[offset : offset + num_bytes])

    def blocks(self, block_bytes: int) -> list[int]:
        """Return the byte that each block is full of, or MIXED."""
        view = self.region.view()
        starts = range(0, len(view), block_bytes)
        return [_only_byte(view[start : start + block_bytes]) for start in starts]

    def checksum(self) -> int:
        return zlib.crc32(self.region.view())

    def fence(self) -> None:
        """Fence and register again, as a decode worker does."""
        self.region.fence()
        self.transport.register(self.region)

    def num_sinks(self) -> int:
        return self.region.num_sinks

    def release_sinks(self) -> None:
        self.region.release_sinks()

    def resident_kilobytes(self, address: int) -> tuple[int, int]:
        """Return what of the mapping at an address has pages, and what of that is huge ones."""
        lines = Path("/proc/self/smaps").read_text().splitlines()
        start = next(
            (n for n, line in enumerate(lines) if line.startswith(f"{address:x}-")), len(lines)
        )
        found = {line.split()[0]: line.split()[1] for line in lines[start + 1 : start + 24]}
        return int(found.get("Rss:", 0)), int(found.get("AnonHugePages:", 0))

    # --- what a test does with it -----------------------------------------------------------------

    def progress(self) -> None:
        if self._is_polling:
            self._received += [arrived.payload for arrived in self.transport.notifications()]

    def set_polling(self, is_polling: bool) -> None:
        """Stop polling the transport, as a process does that is busy or frozen; or go on."""
        self._is_polling = is_polling

    def signal_when_landed(self, byte: int, offset: int, pid: int, number: int) -> None:
        """Send a signal to a process as soon as a byte is in memory here."""

        def watch() -> None:
            while self.region.view()[offset] != byte:
                time.sleep(20e-6)
            os.kill(pid, number)

        threading.Thread(target=watch, daemon=True).start()

    def destroy_while_connecting(self, target: Introduction, count: int) -> None:
        """Destroy so many new agents of this process, each in the midst of connecting to a target,
        with writes that wait for it."""
        name, _, boot = self.transport.name.partition("@")
        spans = [Span(index << 14, 1 << 13) for index in range(4)]
        for number in range(count):
            young = self._make(PeerName(f"{name}-young{number}@{boot}"))
            young.register(self.region)
            young.add_peer(target.region.peer, target.metadata)
            for _ in range(2 + number % 2):  # each takes the connection a step further
                young.write(target.region, spans, spans, b"young")
                time.sleep(0.01)
            young.close()

    def write_on_two_threads(
        self, target: Introduction, first: Job, second: Job
    ) -> tuple[State, State]:
        """Write from two transports of this process at the same time; return how both ended."""
        name, _, boot = self.transport.name.partition("@")
        twin = self._make(PeerName(f"{name}-twin@{boot}"))
        twin.register(self.region)
        twin.add_peer(target.region.peer, target.metadata)
        ended: dict[int, State] = {}

        def run(index: int, transport: Transport, job: Job) -> None:
            handle = transport.write(target.region, job.local, job.target, job.tag)
            while (poll := transport.poll(handle)).state is State.PENDING:
                time.sleep(50e-6)
            ended[index] = poll.state

        threads = [
            threading.Thread(target=run, args=(0, self.transport, first)),
            threading.Thread(target=run, args=(1, twin, second)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        twin.close()
        return ended[0], ended[1]


class RemoteAgent:
    """An `Agent` on NIXL in a process of its own; every method of `Agent` can be called on it.

    Args:
        name: None leaves the process waiting for `become`.
    """

    def __init__(self, name: str | None, *, num_bytes: int, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fabric_agents", str(num_bytes)],
            cwd=ROOT,
            env=child_environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._is_answered = True
        if name is not None:
            self.become(name)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.start(method, *args)
            return self.finish(method)

        return call

    def become(self, name: str) -> None:
        """Give the process its name; does not wait until it has made its agent."""
        self._send("become", name)
        self._is_answered = False

    def start(self, method: str, *args: Any) -> None:
        """Begin a call without waiting for it; `finish` must follow."""
        if not self._is_answered:
            self._is_answered = True
            self._receive()
        self._send(method, *args)

    def finish(self, method: str) -> Any:
        """Return a begun call's result."""
        return msgspec.msgpack.decode(self._receive(), type=_RESULTS.get(method, Any))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def is_stopped(self) -> bool:
        """Return whether all its threads stand still."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return all(
            (task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks
        )

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(self.is_stopped, "the process to stop")

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill the process if it lives, and free its pipes."""
        self.kill()
        self._requests.close()
        self._answers.close()

    def _send(self, method: str, *args: Any) -> None:
        body = msgspec.msgpack.encode((method, args))
        self._requests.write(struct.pack("<I", len(body)) + body)
        self._requests.flush()

    def _receive(self) -> bytes:
        ready, _, _ = select.select([self._answers], [], [], DEADLINE_S)
        assert ready, "the agent's process does not answer"
        header = self._answers.read(4)
        assert len(header) == 4, "the agent's process died"
        return self._answers.read(struct.unpack("<I", header)[0])


_RESULTS: dict[str, Any] = {
    "introduce": Introduction,
    "write": TransferHandle,
    "read": TransferHandle,
    "poll": Poll,
    "received": list[bytes],
    "peek": bytes,
    "resident_kilobytes": tuple[int, int],
    "write_on_two_threads": tuple[State, State],
}
_ARGUMENTS: dict[str, Any] = {
    "add_peer": tuple[Introduction],
    "destroy_while_connecting": tuple[Introduction, int],
    "checksum_of": tuple[list[Span]],
    "write": tuple[RemoteRegion, list[Span], list[Span], bytes],
    "read": tuple[RemoteRegion, list[Span], list[Span]],
    "put": tuple[int, bytes],
    "write_on_two_threads": tuple[Introduction, Job, Job],
}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that another process makes true."""
    deadline = time.monotonic() + DEADLINE_S  # noqa: TID251 - a test's own deadline
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for: {what}"  # noqa: TID251
        time.sleep(0.0002)


def _only_byte(block: memoryview) -> int:
    first = block[0]
    return first if bytes(block) == bytes([first]) * len(block) else MIXED


def _serve(num_bytes: int) -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    agent: Agent | None = None
    num_idle = 0
    while True:
        if agent is not None:
            agent.progress()
        pause_s = 0.0001 if num_idle < 200 else 0.001  # many agents share few processors
        if not select.select([requests], [], [], pause_s if agent else None)[0]:
            num_idle += 1
            continue
        num_idle = 0
        header = requests.read(4)
        if len(header) < 4:
            return
        method, arguments = msgspec.msgpack.decode(requests.read(struct.unpack("<I", header)[0]))
        result: Any = None
        if agent is None:
            agent = Agent(arguments[0], NixlTransport, HostRegion(num_bytes))
        else:
            typed = msgspec.convert(arguments, _ARGUMENTS.get(method, Any))
            result = getattr(agent, method)(*typed)
        body = msgspec.msgpack.encode(result)
        answers.write(struct.pack("<I", len(body)) + body)
        answers.flush()


if __name__ == "__main__":
    sys.setswitchinterval(0.0002)  # the thread that watches memory must not wait for the polls
    _serve(int(sys.argv[1]))
