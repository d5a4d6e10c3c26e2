"""A transfer thread on NIXL: progress by polls alone, no processor time while idle, no torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.ids import Boot
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.region import HostRegion
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import Notification, PeerName, RemoteRegion, Span, TransferState
from tests.fabric_agents import Introduction, RemoteAgent

NUM_BYTES = 8 << 20
WHOLE = [Span(0, NUM_BYTES)]
NAME = PeerName("here@1")
pytestmark = pytest.mark.anyio


@pytest.fixture
def peer() -> Iterator[RemoteAgent]:
    agent = RemoteAgent("there@1", num_bytes=NUM_BYTES, env={})
    yield agent
    agent.end()


class Worker:
    """What a pool has of the fabric."""

    def __init__(self, name: PeerName) -> None:
        self.region = HostRegion(NUM_BYTES)
        self.arrived: asyncio.Queue[Notification] = asyncio.Queue()
        self.thread = TransferThread(
            NixlTransport(name),
            loop=asyncio.get_running_loop(),
            on_notification=self.arrived.put_nowait,
            poll_s=0.0001,
            clock=SystemClock(),
        )
        self.thread.start()

    async def introduce(self) -> Introduction:
        metadata = await self.thread.call(lambda transport: transport.metadata())
        remote = RemoteRegion(
            NAME, Boot("1"), self.region.address, NUM_BYTES, self.region.generation
        )
        return Introduction(remote, metadata)


@asynccontextmanager
async def worker() -> AsyncGenerator[Worker]:
    made = Worker(NAME)
    await made.thread.call(lambda transport: transport.register(made.region))
    try:
        yield made
    finally:
        await made.thread.stop()
        made.region.close()


def thread_cpu_seconds(thread: TransferThread) -> float:
    stat = Path(f"/proc/self/task/{thread._thread.native_id}/stat").read_text()
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100  # clock ticks of 10 ms on every Linux


async def test_writes_both_ways(peer: RemoteAgent) -> None:
    async with worker() as here, asyncio.timeout(20):
        introduction = peer.introduce()
        there = introduction.region
        await here.thread.call(lambda t: t.add_peer(there.peer, introduction.metadata))
        here.region.view()[:] = b"\7" * NUM_BYTES
        outcome = await here.thread.write(there, WHOLE, WHOLE, b"out")
        assert (outcome.state, outcome.num_bytes) == (TransferState.DONE, NUM_BYTES)
        assert peer.peek(NUM_BYTES - 4, 4) == b"\7" * 4

        peer.add_peer(await here.introduce())
        peer.fill(9)
        here.thread.watch()
        handle = peer.write((await here.introduce()).region, WHOLE, WHOLE, b"in")
        while (await asyncio.to_thread(peer.poll, handle)).state is TransferState.PENDING:
            pass
        assert (await here.arrived.get()).payload == b"in"
        here.thread.unwatch()
        assert bytes(here.region.view()[:4]) == b"\x09" * 4


async def test_reads_come_in_and_go_out_also_after_a_fence(peer: RemoteAgent) -> None:
    async with worker() as here, asyncio.timeout(20):
        introduction = peer.introduce()
        there = introduction.region
        await here.thread.call(lambda t: t.add_peer(there.peer, introduction.metadata))
        peer.fill(3)
        outcome = await here.thread.read(there, WHOLE, WHOLE)
        assert (outcome.state, outcome.num_bytes) == (TransferState.DONE, NUM_BYTES)
        assert bytes(here.region.view()) == b"\3" * NUM_BYTES
        await here.thread.call(lambda _: here.region.fence())
        await here.thread.call(lambda t: t.register(here.region))
        peer.add_peer(await here.introduce())
        peer.fill(0)
        here.thread.watch()  # over TCP its polls would be what sends the bytes
        handle = peer.read((await here.introduce()).region, WHOLE, WHOLE)
        while (await asyncio.to_thread(peer.poll, handle)).state is TransferState.PENDING:
            pass
        here.thread.unwatch()
        assert peer.peek(NUM_BYTES - 4, 4) == b"\3" * 4
        peer.fence()
        moved = await here.thread.read(there, WHOLE, WHOLE)
        assert moved.state is TransferState.REFUSED
        peer.kill()
        dead = await here.thread.read(there, WHOLE, WHOLE)
        assert dead.state is TransferState.FAILED


async def test_an_idle_thread_takes_no_processor_time() -> None:
    async with worker() as here:
        here.thread.watch()
        here.thread.unwatch()
        await here.thread.call(lambda transport: transport.health())
        before = thread_cpu_seconds(here.thread)
        await asyncio.sleep(1.0)
        assert thread_cpu_seconds(here.thread) - before < 0.02


async def test_a_renewed_agent_writes_again(peer: RemoteAgent) -> None:
    async with worker() as here, asyncio.timeout(20):
        introduction = peer.introduce()
        peer_name = introduction.region.peer
        for round_number in range(2):
            await here.thread.call(lambda t: t.register(here.region))
            await here.thread.call(lambda t: t.add_peer(peer_name, introduction.metadata))
            tag = f"round {round_number}".encode()
            outcome = await here.thread.write(introduction.region, WHOLE, WHOLE, tag)
            assert outcome.state is TransferState.DONE
            await here.thread.renew(lambda: NixlTransport(NAME))
        assert sorted(peer.received()) == [b"round 0", b"round 1"]


def test_the_fabric_needs_no_torch() -> None:
    program = (
        "import sys; from kv_transfer.nixl.transport import NixlTransport as T; "
        "T('alone@1').close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
