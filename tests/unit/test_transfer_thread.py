"""The transport's thread: calls in order, outcomes and notifications on the loop, no idle polls."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from core.clock import SystemClock
from core.errors import FabricError
from core.ids import Boot
from kv_transfer.bytes_region import BytesRegion
from kv_transfer.inprocess.model import Frozen
from kv_transfer.inprocess.transport import InProcessFabric
from kv_transfer.transfer_thread import MIN_POLL_S, TransferOutcome, TransferThread, pause_s
from kv_transfer.transport import (
    Notification,
    PeerName,
    RemoteRegion,
    Span,
    TransferState,
    Transport,
)

P, D = PeerName("prefill@1"), PeerName("decode@1")
NUM_BYTES = 4096
CLOCK = SystemClock()
pytestmark = pytest.mark.anyio


class Side:
    """One agent on its thread, and what it told the loop."""

    def __init__(self, transport: Transport, *, poll_s: float = 0.0002) -> None:
        self.transport = transport
        self.region = BytesRegion(NUM_BYTES)
        transport.register(self.region)
        self.arrived: asyncio.Queue[Notification] = asyncio.Queue()
        self.outcomes: list[TransferOutcome] = []
        self.thread = TransferThread(
            transport,
            loop=asyncio.get_running_loop(),
            on_notification=self.arrived.put_nowait,
            poll_s=poll_s,
            clock=CLOCK,
            on_outcome=self.outcomes.append,
        )

    @property
    def remote(self) -> RemoteRegion:
        return RemoteRegion(self.transport.name, Boot("1"), self.region.address, NUM_BYTES, 0)


def in_process() -> InProcessFabric:
    return InProcessFabric(now=CLOCK.now, rng=random.Random(0), lock=threading.RLock())


@asynccontextmanager
async def two_sides(fabric: InProcessFabric) -> AsyncGenerator[tuple[Side, Side]]:
    prefill, decode = Side(fabric.transport(P)), Side(fabric.transport(D))
    prefill.transport.add_peer(D, decode.transport.metadata())
    prefill.thread.start()
    decode.thread.start()
    try:
        yield prefill, decode
    finally:
        await prefill.thread.stop()
        await decode.thread.stop()


def blocks(*indices: int) -> list[Span]:
    return [Span(index * 64, 64) for index in indices]


async def soon(awaitable: Any) -> Any:
    async with asyncio.timeout(5):
        return await awaitable


async def test_calls_run_in_order_on_one_other_thread() -> None:
    async with two_sides(in_process()) as (prefill, _):
        seen: list[int] = []
        calls = [prefill.thread.call(lambda _, n=n: seen.append(n)) for n in range(100)]
        ident = await soon(prefill.thread.call(lambda _: threading.get_ident()))
        assert all(call.done() for call in calls)
        assert seen == list(range(100))
        assert ident != threading.get_ident()


async def test_a_call_gets_the_transport_and_its_exception_comes_back() -> None:
    async with two_sides(in_process()) as (prefill, _):
        assert await soon(prefill.thread.call(lambda transport: transport.name)) == P
        with pytest.raises(ZeroDivisionError):
            await soon(prefill.thread.call(lambda _: 1 // 0))
        assert await soon(prefill.thread.call(lambda _: "alive")) == "alive"


async def test_a_write_resolves_with_what_it_was() -> None:
    async with two_sides(in_process()) as (prefill, decode):
        prefill.region.view()[:256] = b"k" * 256
        write = prefill.thread.write(decode.remote, blocks(0, 1, 2, 3), blocks(8, 9, 3, 4), b"t")
        outcome: TransferOutcome = await soon(write)
        assert (outcome.state, outcome.num_bytes, outcome.num_descriptors) == (
            TransferState.DONE,
            256,
            2,
        )
        assert 0 <= outcome.posted_s <= outcome.seconds < 5
        assert prefill.outcomes == [outcome]
        assert bytes(decode.region.view()[512:640]) == b"k" * 128
        assert bytes(decode.region.view()[192:320]) == b"k" * 128


async def test_a_tag_may_be_made_as_the_write_is_posted() -> None:
    async with two_sides(in_process()) as (prefill, decode):
        prefill.region.view()[:4] = b"tail"

        def tag(transport: Transport) -> bytes:
            assert threading.current_thread().name == "kv-transfer"
            return str(transport.checksum([Span(0, 4)])).encode()

        decode.thread.watch()
        await soon(prefill.thread.write(decode.remote, blocks(0), blocks(1), tag))
        arrived = await soon(decode.arrived.get())
        assert arrived.payload == str(prefill.region.checksum([(0, 4)])).encode()
        decode.thread.unwatch()


async def test_a_read_resolves_with_what_it_was_and_is_counted() -> None:
    async with two_sides(in_process()) as (prefill, decode):
        decode.region.view()[:128] = b"k" * 128
        read = prefill.thread.read(decode.remote, blocks(8, 9), blocks(0, 1))
        outcome: TransferOutcome = await soon(read)
        assert (outcome.state, outcome.num_bytes, outcome.num_descriptors) == (
            TransferState.DONE,
            128,
            1,
        )
        assert prefill.outcomes == [outcome]
        assert bytes(prefill.region.view()[512:640]) == b"k" * 128
        decode.region.fence()
        moved = await soon(prefill.thread.read(decode.remote, blocks(0), blocks(0)))
        assert moved.state is TransferState.FAILED, "an address that it has not learnt"
        with pytest.raises(ValueError, match="spans"):
            await soon(prefill.thread.read(decode.remote, blocks(0, 1), blocks(0)))


async def test_notifications_come_while_watching_and_keep_while_not() -> None:
    async with two_sides(in_process()) as (prefill, decode):
        await soon(prefill.thread.write(decode.remote, blocks(0), blocks(0), b"kept"))
        await asyncio.sleep(0.02)
        assert decode.arrived.empty(), "nobody polls an unwatched thread"
        decode.thread.watch()
        assert (await soon(decode.arrived.get())).payload == b"kept"
        await soon(prefill.thread.write(decode.remote, blocks(0), blocks(0), b"live"))
        assert await soon(decode.arrived.get()) == Notification(P, b"live")
        decode.thread.unwatch()


class CountingTransport:
    """Counts the polls for notifications of the transport that it wraps."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.num_polls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def notifications(self) -> list[Notification]:
        self.num_polls += 1
        return self._inner.notifications()


async def test_it_polls_only_while_watching_and_not_faster_than_told() -> None:
    transport = CountingTransport(in_process().transport(D))
    side = Side(transport, poll_s=0.0)  # type: ignore[arg-type] - forwards all but one method
    side.thread.start()
    await asyncio.sleep(0.05)
    assert transport.num_polls == 0
    side.thread.watch()
    side.thread.watch()
    side.thread.unwatch()
    await asyncio.sleep(0.05)
    assert 1 <= transport.num_polls <= 0.05 / MIN_POLL_S * 4
    side.thread.unwatch()
    await soon(side.thread.call(lambda _: None))
    polled = transport.num_polls
    await asyncio.sleep(0.05)
    assert transport.num_polls <= polled + 1
    await side.thread.stop()


@pytest.mark.parametrize(
    ("quiet_s", "is_transferring", "expected"),
    [
        (0.0, False, 1e-4),
        (0.005, False, 5e-4),
        (9.0, False, 1e-3),
        (0.049, True, 1e-4),
        (9.0, True, 1e-3),  # to a frozen peer, for ever
    ],
)
async def test_polls_become_rare_where_nothing_happens(
    quiet_s: float, is_transferring: bool, expected: float
) -> None:
    assert pause_s(quiet_s, 1e-4, is_transferring=is_transferring) == pytest.approx(expected)


async def test_a_write_to_a_frozen_peer_stays_open_and_stop_fails_it() -> None:
    fabric = in_process()
    async with two_sides(fabric) as (prefill, decode):
        fabric.freeze(D, Frozen.ALL)
        write = prefill.thread.write(decode.remote, blocks(0), blocks(0), b"t")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.shield(write)
        await soon(prefill.thread.stop())
        assert (await write).state is TransferState.FAILED
        assert not prefill.transport.health().ok, "the agent is destroyed"
        with pytest.raises(FabricError, match="stopped"):
            await prefill.thread.write(decode.remote, blocks(0), blocks(0), b"t")


async def test_renew_fails_what_is_pending_and_goes_on_with_a_fresh_agent() -> None:
    fabric = in_process()
    async with two_sides(fabric) as (prefill, decode):
        fabric.freeze(D, Frozen.ALL)
        write = prefill.thread.write(decode.remote, blocks(0), blocks(0), b"old")
        await soon(prefill.thread.renew(lambda: fabric.transport(P)))
        assert (await soon(write)).reason == "the agent was destroyed"
        fabric.thaw(D)
        metadata = decode.transport.metadata()
        await soon(prefill.thread.call(lambda transport: transport.register(prefill.region)))
        await soon(prefill.thread.call(lambda transport: transport.add_peer(D, metadata)))
        decode.thread.watch()
        again = await soon(prefill.thread.write(decode.remote, blocks(0), blocks(0), b"new"))
        assert again.state is TransferState.DONE
        assert (await soon(decode.arrived.get())).payload == b"new"
        decode.thread.unwatch()


async def test_spans_that_do_not_match_raise_and_post_nothing() -> None:
    async with two_sides(in_process()) as (prefill, decode):
        with pytest.raises(ValueError, match="spans"):
            await soon(prefill.thread.write(decode.remote, blocks(0, 1), blocks(0), b"t"))
        outside = [Span(NUM_BYTES, 64)]
        with pytest.raises(ValueError, match="not inside"):
            await soon(prefill.thread.write(decode.remote, blocks(0), outside, b"t"))
        assert prefill.outcomes == []


async def test_a_cancelled_write_goes_on_and_is_counted() -> None:
    async with two_sides(in_process()) as (prefill, decode):
        write = prefill.thread.write(decode.remote, blocks(0), blocks(0), b"t")
        write.cancel()
        decode.thread.watch()
        await soon(decode.arrived.get())
        decode.thread.unwatch()
        await soon(prefill.thread.call(lambda _: None))
        assert [outcome.state for outcome in prefill.outcomes] == [TransferState.DONE]


@pytest.fixture
async def faults() -> AsyncIterator[list[dict[str, Any]]]:
    """Collect what the loop's exception handler is told."""
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    yield told
    loop.set_exception_handler(None)


async def test_one_callbacks_fault_is_told_and_loses_nothing_else(
    faults: list[dict[str, Any]],
) -> None:
    side = Side(in_process().transport(D))

    def broken(_: Notification) -> None:
        msg = "broken callback"
        raise RuntimeError(msg)

    side.thread = TransferThread(
        side.transport,
        loop=asyncio.get_running_loop(),
        on_notification=broken,
        poll_s=0.0002,
        clock=CLOCK,
    )
    side.transport.add_peer(D, side.transport.metadata())
    side.thread.start()
    side.thread.watch()
    outcome = await soon(side.thread.write(side.remote, blocks(0), blocks(1), b"to myself"))
    assert outcome.state is TransferState.DONE
    await soon(side.thread.stop())
    assert [str(context["exception"]) for context in faults] == ["broken callback"]


async def test_a_broken_transport_ends_the_thread_loudly(faults: list[dict[str, Any]]) -> None:
    class Broken(CountingTransport):
        def notifications(self) -> list[Notification]:
            msg = "broken transport"
            raise RuntimeError(msg)

    side = Side(Broken(in_process().transport(D)))  # type: ignore[arg-type]
    side.thread.start()
    side.thread.watch()
    await soon(side.thread.stop())
    assert [str(context["exception"]) for context in faults] == ["broken transport"]
    with pytest.raises(FabricError):
        await side.thread.call(lambda _: None)


async def test_stop_without_destroying_leaves_the_transport() -> None:
    side = Side(in_process().transport(D))
    side.thread.start()
    await soon(side.thread.stop(destroy=False))
    assert side.transport.health().ok
    await soon(side.thread.stop())
    assert not side.transport.health().ok


async def test_stop_before_start_closes_the_transport() -> None:
    side = Side(in_process().transport(D))
    await soon(side.thread.stop())
    assert not side.transport.health().ok


def test_a_loop_that_closed_without_stop_ends_the_thread_and_destroys_the_agent() -> None:
    go_on = threading.Event()

    async def leave() -> Side:
        side = Side(in_process().transport(D))
        side.thread.start()
        side.thread.call(lambda _: go_on.wait())
        return side

    side = asyncio.run(leave())
    go_on.set()
    side.thread._thread.join(5)
    assert not side.thread._thread.is_alive()
    assert not side.transport.health().ok
