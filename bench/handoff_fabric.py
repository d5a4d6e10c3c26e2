"""How fast a prompt's KV blocks move to another process, against a memory copy of the same bytes.

Writes the blocks of a 2,000-token prompt (125 blocks of 16 tokens) from one process's pool into
another's over NIXL as a prefill worker does, through a `TransferThread`, and reads them back. A
write counts until the other process has seen its notification, a read until its bytes are known to
be the source's. The copy is within this process, between two such pools. Then a pool is fenced: how
long the engine stands still while its pages move, and how long until peers can be told.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import statistics
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from bench.figures import Figure, figure
from core.clock import SystemClock
from core.environment import child_environment
from core.ids import BlockId, Boot
from kv_transfer.descriptors import SpanPairs, paired_spans
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.region import HostRegion
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import Notification, PeerName, RemoteRegion, TransferState

NUM_BLOCKS = 125
BLOCK_KIB = (360, 720)
"""SmolLM2-135M's block in bf16 and in f32."""

ROUNDS = 21
AIM = 0.6
FENCED_BYTES = 1 << 30
"""The default pool on a CPU."""

FENCE_AIM_MS = 2.0
CLOCK = SystemClock()
ROOT = Path(__file__).resolve().parent.parent
TARGET = PeerName("target@1")


class Introduction(msgspec.Struct, frozen=True):
    """What the writer must know of the target."""

    region: RemoteRegion
    metadata: bytes


class Round(msgspec.Struct, frozen=True):
    """One copy, one write and one read of the same bytes, in seconds."""

    copy_s: float
    write_s: float
    read_s: float


def run() -> Iterator[Figure]:
    """Measure both block sizes, as one run of blocks and with every block by itself."""
    for block_kib, scattered in itertools.product(BLOCK_KIB, (False, True)):
        placement = "scattered" if scattered else "contiguous"
        name = f"handoff_fabric.{NUM_BLOCKS}x{block_kib}KiB.{placement}"
        yield from asyncio.run(_measure(name, block_kib << 10, scattered=scattered))
    yield from _fences()


def _spans(block_bytes: int, *, scattered: bool) -> SpanPairs:
    sources = [BlockId(block) for block in range(NUM_BLOCKS)]
    if not scattered:
        return paired_spans(sources, sources, block_bytes)
    every_other = itertools.chain(range(0, NUM_BLOCKS, 2), range(1, NUM_BLOCKS, 2))
    return paired_spans(sources, [BlockId(block) for block in every_other], block_bytes)


async def _measure(name: str, block_bytes: int, *, scattered: bool) -> list[Figure]:
    num_bytes = NUM_BLOCKS * block_bytes
    local, there = _spans(block_bytes, scattered=scattered)
    pool, copy = HostRegion(num_bytes), HostRegion(num_bytes)
    pool.prefault()
    copy.prefault()
    async with _target_process(num_bytes) as target:
        introduction = msgspec.json.decode(await _line(target), type=Introduction)
        transport = NixlTransport(PeerName("writer@1"))
        transport.register(pool)
        transport.add_peer(TARGET, introduction.metadata)
        thread = _thread(transport, _ignore)
        rounds: list[Round] = []
        for number in range(ROUNDS + 1):
            started = CLOCK.now()
            ctypes.memmove(copy.address, pool.address, num_bytes)
            copied = CLOCK.now()
            outcome = await thread.write(introduction.region, local, there, b"%d" % number)
            await _line(target)
            written = CLOCK.now()
            back = await thread.read(introduction.region, local, there)
            read_s = CLOCK.now() - written
            rounds.append(Round(copied - started, written - copied, read_s))
            assert outcome.state is back.state is TransferState.DONE, (outcome, back)
        health = await thread.call(lambda fabric: fabric.health())
        await thread.stop()
    pool.close()
    copy.close()
    how = f"{len(local)} descriptors, {health.transport}"
    # The first write to a peer connects.
    return [
        _speed(name, [(r.copy_s, r.write_s) for r in rounds[1:]], num_bytes, f"write {how}"),
        _speed(
            f"{name}.read", [(r.copy_s, r.read_s) for r in rounds[1:]], num_bytes, f"read {how}"
        ),
    ]


def _speed(name: str, seconds: list[tuple[float, float]], num_bytes: int, what: str) -> Figure:
    """Compare the speeds of a copy and of a transfer."""
    copy_speed = num_bytes / statistics.median(copy_s for copy_s, _ in seconds) / 1e9
    speed = num_bytes / statistics.median(moved_s for _, moved_s in seconds) / 1e9
    return figure(
        name,
        [copy_s / moved_s for copy_s, moved_s in seconds],
        "of a memory copy's bytes/s",
        against=f"copy {copy_speed:.2f} GB/s; {speed:.2f} GB/s {what}",
        at_least=AIM,
    )


def _fences() -> Iterator[Figure]:
    """Move a pool that has all its pages and a few sinks, and register it anew."""
    region = HostRegion(FENCED_BYTES)
    region.prefault()
    transport = NixlTransport(PeerName("fenced@1"))
    transport.register(region)
    moved_s: list[float] = []
    registered_s: list[float] = []
    for _ in range(ROUNDS):
        started = CLOCK.now()
        region.fence()
        moved = CLOCK.now()
        transport.register(region)
        moved_s.append(moved - started)
        registered_s.append(CLOCK.now() - started)
    transport.close()
    region.close()
    name = f"handoff_fabric.fence.{FENCED_BYTES >> 20}MiB"
    stood_ms, told_ms = [1e3 * s for s in moved_s], [1e3 * s for s in registered_s]
    yield figure(name, stood_ms, "ms", against="the step that waits", at_most=FENCE_AIM_MS)
    yield figure(f"{name}.registered", told_ms, "ms")


# --- the process that is written to ---------------------------------------------------------------


@asynccontextmanager
async def _target_process(num_bytes: int) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Start it; it prints its introduction, then a line for each notification."""
    command = (sys.executable, "-m", "bench.handoff_fabric", str(num_bytes))
    process = await asyncio.create_subprocess_exec(
        *command, env=child_environment(), cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


async def _be_target(num_bytes: int) -> None:
    """A decode worker's side of the fabric, with a handoff open."""
    region = HostRegion(num_bytes)
    region.prefault()
    transport = NixlTransport(TARGET)
    transport.register(region)
    remote = RemoteRegion(TARGET, Boot("1"), region.address, region.num_bytes, 0)
    introduction = Introduction(remote, transport.metadata())
    thread = _thread(transport, lambda arrived: _print(arrived.payload))
    thread.watch()
    _print(msgspec.json.encode(introduction))
    await asyncio.Event().wait()


def _thread(
    transport: NixlTransport, on_notification: Callable[[Notification], None]
) -> TransferThread:
    """Start a transfer thread as workers have it by default."""
    thread = TransferThread(
        transport,
        loop=asyncio.get_running_loop(),
        on_notification=on_notification,
        poll_s=0.0001,
        clock=CLOCK,
    )
    thread.start()
    return thread


def _ignore(_: Notification) -> None:
    pass


def _print(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(_be_target(int(sys.argv[1])))
