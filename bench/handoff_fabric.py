"""How fast a prompt's KV blocks move to another process, against a memory copy of the same bytes.

Writes the blocks of a 2,000-token prompt (125 blocks of 16 tokens) from one process's pool into
another's over NIXL as a prefill worker does, through a `TransferThread`. A write counts until the
other process has seen its notification. The copy is within this process, between two such pools.
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
from kv_transfer.transport import Notification, PeerName, RemoteRegion, WriteState

NUM_BLOCKS = 125
BLOCK_KIB = (360, 720)
"""SmolLM2-135M's block in bf16 and in f32."""

ROUNDS = 21
AIM = 0.6
CLOCK = SystemClock()
ROOT = Path(__file__).resolve().parent.parent
TARGET = PeerName("target@1")


class Introduction(msgspec.Struct, frozen=True):
    """What the writer must know of the target."""

    region: RemoteRegion
    metadata: bytes


class Round(msgspec.Struct, frozen=True):
    """One copy and one write of the same bytes, in seconds."""

    copy_s: float
    write_s: float


def run() -> Iterator[Figure]:
    """Measure both block sizes, as one run of blocks and with every block by itself."""
    for block_kib, scattered in itertools.product(BLOCK_KIB, (False, True)):
        placement = "scattered" if scattered else "contiguous"
        name = f"handoff_fabric.{NUM_BLOCKS}x{block_kib}KiB.{placement}"
        yield asyncio.run(_measure(name, block_kib << 10, scattered=scattered))


def _spans(block_bytes: int, *, scattered: bool) -> SpanPairs:
    sources = [BlockId(block) for block in range(NUM_BLOCKS)]
    if not scattered:
        return paired_spans(sources, sources, block_bytes)
    every_other = itertools.chain(range(0, NUM_BLOCKS, 2), range(1, NUM_BLOCKS, 2))
    return paired_spans(sources, [BlockId(block) for block in every_other], block_bytes)


async def _measure(name: str, block_bytes: int, *, scattered: bool) -> Figure:
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
            rounds.append(Round(copied - started, CLOCK.now() - copied))
            assert outcome.state is WriteState.DONE, outcome.reason
        health = await thread.call(lambda fabric: fabric.health())
        await thread.stop()
    pool.close()
    copy.close()
    return _figure(name, rounds[1:], num_bytes, f"{len(local)} descriptors, {health.transport}")


def _figure(name: str, rounds: list[Round], num_bytes: int, how: str) -> Figure:
    """The first write to a peer connects, so it is not among `rounds`."""
    copy_speed = num_bytes / statistics.median(r.copy_s for r in rounds) / 1e9
    write_speed = num_bytes / statistics.median(r.write_s for r in rounds) / 1e9
    return figure(
        name,
        [r.copy_s / r.write_s for r in rounds],
        "of a memory copy's bytes/s",
        against=f"copy {copy_speed:.2f} GB/s; write {write_speed:.2f} GB/s, {how}",
        at_least=AIM,
    )


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
