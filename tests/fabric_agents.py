"""Agents that the transport suite drives alike: in this process, or one real process each.

Run as a program it is such a process: requests come on standard input, answers go to standard
output, and between them it polls its transport, as a worker does.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from core.environment import child_environment
from core.errors import FabricError
from core.ids import Boot
from core.memory_region import MemoryRegion
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.region import HostRegion
from kv_transfer.transport import PeerName, Poll, RemoteRegion, Span, Transport, WriteHandle

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 15.0


class Introduction(msgspec.Struct):
    """What a writer must know of a target."""

    region: RemoteRegion
    metadata: bytes


class Agent:
    """A transport and its one region, in this process."""

    def __init__(self, transport: Transport, region: MemoryRegion) -> None:
        self.transport = transport
        self.region = region
        self._received: list[bytes] = []
        self._is_closed = False
        transport.register(region)

    def introduce(self) -> Introduction:
        name, boot = self.transport.name, Boot(self.transport.name.partition("@")[2])
        region = self.region
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
    ) -> WriteHandle:
        return self.transport.write(remote, local, target, tag)

    def poll(self, handle: WriteHandle) -> Poll:
        return self.transport.poll(handle)

    def progress(self) -> None:
        if self._is_closed:
            return
        self._received += [arrived.payload for arrived in self.transport.notifications()]

    def received(self) -> list[bytes]:
        self.progress()
        return self._received

    def fill(self, byte: int) -> None:
        self.region.view()[:] = bytes([byte]) * self.region.num_bytes

    def put(self, offset: int, data: bytes) -> None:
        self.region.view()[offset : offset + len(data)] = data

    def read(self, offset: int, num_bytes: int) -> bytes:
        return bytes(self.region.view()[offset : offset + num_bytes])

    def contains(self, byte: int) -> bool:
        return byte in bytes(self.region.view())

    def digest(self) -> str:
        return hashlib.blake2b(self.region.view(), digest_size=16).hexdigest()

    def fence(self) -> None:
        """Fence and register again, as a decode worker does."""
        self.region.fence()  # type: ignore[attr-defined] - both regions of the tests have it
        self.transport.register(self.region)

    def health(self) -> str:
        return self.transport.health().transport

    def close(self) -> None:
        self._is_closed = True
        self.transport.close()


class RemoteAgent:
    """An `Agent` on NIXL in a process of its own; every method of `Agent` can be called on it."""

    def __init__(self, name: str, *, num_bytes: int, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.fabric_agents", name, str(num_bytes)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=child_environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._send("progress")

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.start(method, *args)
            return self.finish(method)

        return call

    def start(self, method: str, *args: Any) -> None:
        """Begin a call without waiting for it; `finish` must follow."""
        self._await_ready()
        self._send(method, *args)

    def finish(self, method: str) -> Any:
        """Return a begun call's result."""
        return msgspec.msgpack.decode(self._receive(), type=_RESULTS.get(method, Any))

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill the process if it lives, and free its pipes."""
        self.kill()
        self._requests.close()
        self._answers.close()

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _await_ready(self) -> None:
        """Take the answer to the first request, which says that the process has started."""
        if not self.__dict__.get("_is_ready"):
            self._is_ready = True
            self._receive()

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
    "write": WriteHandle,
    "poll": Poll,
    "received": list[bytes],
    "read": bytes,
}
_ARGUMENTS: dict[str, Any] = {
    "add_peer": tuple[Introduction],
    "write": tuple[RemoteRegion, list[Span], list[Span], bytes],
    "put": tuple[int, bytes],
}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that another process makes true."""
    deadline = time.monotonic() + DEADLINE_S  # noqa: TID251 - a test's own deadline
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for: {what}"  # noqa: TID251
        time.sleep(0.0002)


def _serve(agent: Agent) -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        agent.progress()
        if not select.select([requests], [], [], 0.0001)[0]:
            continue
        header = requests.read(4)
        if len(header) < 4:
            return
        method, arguments = msgspec.msgpack.decode(requests.read(struct.unpack("<I", header)[0]))
        arguments = msgspec.convert(arguments, _ARGUMENTS.get(method, Any))
        body = msgspec.msgpack.encode(getattr(agent, method)(*arguments))
        answers.write(struct.pack("<I", len(body)) + body)
        answers.flush()


if __name__ == "__main__":
    pool = HostRegion(int(sys.argv[2]))
    _serve(Agent(NixlTransport(PeerName(sys.argv[1])), pool))
