"""prefill_pool.pusher: connections, and which writes tell routers how fast the fabric is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from core.errors import FabricError
from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import BlockRun, PrefillAsk, RegionDescriptor
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from kv_transfer.handoff.prefill_messages import Push
from kv_transfer.transfer_thread import TransferOutcome, TransferThread
from kv_transfer.transport import Poll, Span, TransferState
from prefill_pool.pusher import MEASURED_BYTES, Pusher

pytestmark = pytest.mark.anyio

BLOCK_BYTES = MEASURED_BYTES // 4


class Connections:
    """The calls of a transport that open and close connections."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def add_peer(self, name: str, metadata: bytes) -> None:
        self.calls.append(("add", name))

    def remove_peer(self, name: str) -> None:
        self.calls.append(("remove", name))


class ScriptedFabric:
    """Every write ends at once, as `seconds` and `state` say, or when a test ends it."""

    def __init__(self) -> None:
        self.seconds = 0.001
        self.state = TransferState.DONE
        self.connections = Connections()
        self.is_slow = False
        self.pending: list[asyncio.Future[TransferOutcome]] = []

    def call(self, function: Callable[[Any], object]) -> asyncio.Future[None]:
        return _done(function(self.connections))

    async def renew(self, make: Callable[[], Any]) -> None:
        """Nothing to destroy."""

    def write(
        self, remote: object, local: Sequence[Span], target: Sequence[Span], tag: bytes
    ) -> asyncio.Future[TransferOutcome]:
        if self.is_slow:
            self.pending.append(asyncio.get_running_loop().create_future())
            return self.pending[-1]
        num_bytes = sum(span.num_bytes for span in local)
        return _done(TransferOutcome(self.state, "", 0.0, self.seconds, num_bytes, len(local)))

    def end(self, write: int, state: TransferState) -> None:
        self.pending[write].set_result(TransferOutcome(state, "", 0.0, self.seconds, 1, 1))


def _done(result: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


class Writer:
    """A pusher over a scripted fabric."""

    def __init__(self) -> None:
        self.fabric = ScriptedFabric()
        self.pusher = Pusher(cast("TransferThread", cast("object", self.fabric)), Boot("here"))

    async def push(self, num_blocks: int, peer: str = "decode-0") -> TransferState:
        return (await self.post(num_blocks, peer)).state

    def post(self, num_blocks: int, peer: str = "decode-0") -> asyncio.Future[Poll]:
        blocks = tuple(BlockId(i) for i in range(num_blocks))
        region = RegionDescriptor(
            worker_id=WorkerId(peer),
            boot=Boot("there"),
            generation=0,
            address=4096,
            num_bytes=BLOCK_BYTES * num_blocks,
            block_bytes=BLOCK_BYTES,
            layout="layout",
            metadata=b"",
        )
        ask = PrefillAsk(
            handoff=HandoffId(RequestId("r"), Attempt(1, 1)),
            request=EngineRequest(RequestId("r"), (1,), SamplingParams()),
            first_block=0,
            blocks=(BlockRun(BlockId(0), num_blocks),),
            region=region,
            remaining_s=60.0,
        )
        ended: asyncio.Future[Poll] = asyncio.get_running_loop().create_future()
        self.pusher.push(ask, Push(0, 0, blocks, blocks), ended.set_result)
        return ended


async def test_a_small_write_says_nothing_about_bandwidth() -> None:
    writer = Writer()
    await writer.push(4)
    writer.fabric.seconds = 0.1  # its latency
    await writer.push(1)
    assert writer.pusher.bytes_per_s is None
    writer.fabric.seconds = 0.001
    await writer.push(4)
    assert writer.pusher.bytes_per_s == pytest.approx(MEASURED_BYTES / 0.001)
    assert (writer.pusher.num_blocks, writer.pusher.num_bytes) == (9, 9 * BLOCK_BYTES)


async def test_neither_does_the_first_write_on_a_connection() -> None:
    writer = Writer()
    writer.fabric.seconds = 10.0
    await writer.push(8)
    await writer.push(8, peer="decode-1")
    assert writer.pusher.bytes_per_s is None
    await writer.push(8)
    assert writer.pusher.bytes_per_s == pytest.approx(8 * BLOCK_BYTES / 10.0)
    await writer.pusher.renew(lambda: cast("Any", None))
    writer.fabric.seconds = 1000.0
    await writer.push(8)
    assert writer.pusher.bytes_per_s == pytest.approx(8 * BLOCK_BYTES / 10.0)


async def test_after_a_failed_write_the_connection_is_a_new_one() -> None:
    writer = Writer()
    await writer.push(8)
    writer.fabric.state = TransferState.FAILED
    assert await writer.push(8) is TransferState.FAILED
    writer.fabric.state = TransferState.DONE
    await writer.push(8)
    assert writer.pusher.bytes_per_s is None
    assert writer.pusher.num_failed == 1


async def test_a_connection_that_failed_is_closed_before_it_is_opened_anew() -> None:
    writer = Writer()
    peer = "decode-0@there"
    await writer.push(1)
    writer.fabric.state = TransferState.FAILED
    await writer.push(1)
    assert writer.fabric.connections.calls == [("add", peer), ("remove", peer)]
    await writer.push(1, peer="decode-1")
    await writer.push(1)
    assert writer.fabric.connections.calls[-2:] == [("add", peer), ("remove", peer)]


async def test_it_is_not_closed_under_other_writes_of_its() -> None:
    """Removing a peer fails the writes to it that are under way, although their bytes land."""
    writer = Writer()
    writer.fabric.is_slow = True
    first, second = writer.post(1), writer.post(1)
    writer.fabric.end(0, TransferState.FAILED)
    assert (await first).state is TransferState.FAILED
    assert [what for what, _ in writer.fabric.connections.calls] == ["add"]
    writer.fabric.end(1, TransferState.DONE)
    assert (await second).state is TransferState.DONE
    assert [what for what, _ in writer.fabric.connections.calls] == ["add", "remove"]


async def test_a_write_of_a_destroyed_agent_closes_no_connection_of_the_next_one() -> None:
    writer = Writer()
    writer.fabric.is_slow = True
    old = writer.post(1)
    await writer.pusher.renew(lambda: cast("Any", None))
    writer.post(1)
    writer.fabric.end(0, TransferState.FAILED)
    assert (await old).state is TransferState.FAILED
    assert [what for what, _ in writer.fabric.connections.calls] == ["add", "add"]


async def test_a_write_that_was_not_posted_is_told_so_and_leaves_the_connection() -> None:
    writer = Writer()
    await writer.push(1)
    writer.fabric.state = TransferState.REFUSED
    assert await writer.push(1) is TransferState.REFUSED
    writer.fabric.is_slow = True
    raising = writer.post(1)
    writer.fabric.pending[0].set_exception(FabricError("the fabric stopped"))
    assert await raising == Poll(TransferState.REFUSED, "the fabric stopped")
    assert writer.fabric.connections.calls == [("add", "decode-0@there")]
    assert writer.pusher.num_failed == 2


async def test_a_worker_that_left_is_removed_from_the_fabric() -> None:
    writer = Writer()
    await writer.push(1)
    writer.pusher.forget("decode-0", Boot("another life"))
    writer.pusher.forget("decode-0", Boot("there"))
    writer.pusher.forget("decode-0", Boot("there"))
    peer = "decode-0@there"
    assert writer.fabric.connections.calls == [("add", peer), ("remove", peer)]


async def test_what_is_held_is_posted_later_or_given_up() -> None:
    writer = Writer()
    writer.pusher.hold()
    waits = writer.post(2)
    await writer.pusher.quiet()
    assert writer.fabric.connections.calls == []
    writer.pusher.resume()
    assert (await waits).state is TransferState.DONE
    writer.pusher.hold()
    given_up = writer.post(2)
    writer.pusher.refuse_held("the region moves")
    assert await given_up == Poll(TransferState.REFUSED, "the region moves")
    writer.pusher.resume()
    assert writer.pusher.num_blocks == 2


async def test_it_is_quiet_once_the_last_write_has_ended() -> None:
    writer = Writer()
    writer.fabric.is_slow = True
    ends = [writer.post(1), writer.post(1)]
    quiet = asyncio.ensure_future(writer.pusher.quiet())
    writer.fabric.end(0, TransferState.DONE)
    await ends[0]
    assert not quiet.done()
    writer.fabric.end(1, TransferState.FAILED)
    await ends[1]
    await quiet
