"""After a fabric error the pusher reaches its peer on a fresh connection: NIXL, two processes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import BlockRun, PrefillAsk, RegionDescriptor
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from kv_transfer.handoff.prefill_messages import Push
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.region import HostRegion
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import PeerName, Poll, TransferState
from prefill_pool.pusher import Pusher
from tests.fabric_agents import RemoteAgent

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 8
pytestmark = pytest.mark.anyio


@pytest.fixture(params=["cma", "tcp"])
def decode(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RemoteAgent]:
    tls = {"cma": "cma,tcp", "tcp": "tcp"}[request.param]
    agent = RemoteAgent("decode@1", num_bytes=BLOCK_BYTES * NUM_BLOCKS, env={"UCX_TLS": tls})
    yield agent
    agent.end()


def ask_of(decode: RemoteAgent) -> PrefillAsk:
    told = decode.introduce()
    region = RegionDescriptor(
        worker_id=WorkerId("decode"),
        boot=Boot("1"),
        generation=told.region.generation,
        address=told.region.address,
        num_bytes=told.region.num_bytes,
        block_bytes=BLOCK_BYTES,
        layout="",
        metadata=told.metadata,
    )
    request = EngineRequest(RequestId("r"), (1,), SamplingParams())
    handoff = HandoffId(RequestId("r"), Attempt(1, 1))
    return PrefillAsk(handoff, request, 0, (BlockRun(BlockId(0), 1),), region, 60.0)


async def push(pusher: Pusher, ask: PrefillAsk, block: int) -> TransferState:
    """Return how the write ended."""
    ended: asyncio.Future[Poll] = asyncio.get_running_loop().create_future()
    blocks = (BlockId(block),)
    pusher.push(ask, Push(block, block, blocks, blocks), ended.set_result)
    async with asyncio.timeout(10.0):
        return (await ended).state


def cut_connections() -> int:
    """Shut every TCP connection of this process; what a switch or a firewall does to it."""
    num_cut = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
        except OSError:  # no socket, or one that listens
            continue
    return num_cut


@pytest.fixture
async def pusher() -> AsyncIterator[Pusher]:
    """A prefill worker's end, its blocks full of sevens."""
    region = HostRegion(BLOCK_BYTES * NUM_BLOCKS)
    region.view()[:] = b"\x07" * region.num_bytes
    thread = TransferThread(
        NixlTransport(PeerName("prefill@1")),
        loop=asyncio.get_running_loop(),
        on_notification=lambda notification: None,
        poll_s=0.0001,
        clock=SystemClock(),
    )
    thread.start()
    await thread.call(lambda transport: transport.register(region))
    yield Pusher(thread, Boot("prefill"))
    await thread.stop()
    region.close()


async def test_the_write_after_a_failed_one_arrives(decode: RemoteAgent, pusher: Pusher) -> None:
    ask = ask_of(decode)
    assert await push(pusher, ask, 0) is TransferState.DONE
    assert cut_connections() > 0
    assert await push(pusher, ask, 1) is TransferState.FAILED
    assert await push(pusher, ask, 2) is TransferState.DONE
    assert pusher.transport in ("ucx (cma)", "ucx (tcp)"), "not both: the old sockets' past"
    assert decode.peek(2 * BLOCK_BYTES, 4) == b"\x07" * 4


async def test_a_retry_among_writes_that_fail_ends_and_the_next_one_arrives(
    decode: RemoteAgent, pusher: Pusher
) -> None:
    """While writes to a peer are pending its old connection stays, in error or not: a retry over
    it fails like them, and only then is the peer reached anew."""
    ask = ask_of(decode)
    assert await push(pusher, ask, 0) is TransferState.DONE
    decode.set_polling(False)
    pending = [asyncio.ensure_future(push(pusher, ask, block)) for block in (1, 2, 3)]
    await asyncio.sleep(0.05)
    cut_connections()
    retry = await push(pusher, ask, 4)
    decode.set_polling(True)
    assert retry is TransferState.FAILED
    assert set(await asyncio.gather(*pending)) <= {TransferState.FAILED, TransferState.DONE}
    assert await push(pusher, ask, 5) is TransferState.DONE
    assert decode.peek(5 * BLOCK_BYTES, 4) == b"\x07" * 4
