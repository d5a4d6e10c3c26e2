"""What every transport owes its callers for writes, on real processes over NIXL and inside one."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.kv_layout import KvDtype, KvLayout, LayerLayout
from core.messages import BlockRun, HandoffRefused, PrefillAsk, RegionDescriptor
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from kv_transfer.handoff.arrivals import awaiting
from kv_transfer.handoff.prefill_messages import Compute, Forget, Tell
from kv_transfer.handoff.prefill_side import PrefillTerms, receive
from kv_transfer.transport import Poll, Span, TransferState
from tests.fabric_agents import Job, wait_until
from tests.fabric_fleet import (
    NUM_BLOCKS,
    Backend,
    Fleet,
    Pair,
    blocks,
    end_of,
    open_fleet,
    write_all,
)

BLOCK_BYTES = 128 << 10


@pytest.fixture(params=list(Backend), scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with open_fleet(request.param, block_bytes=BLOCK_BYTES) as opened:
        yield opened


@pytest.fixture(scope="module")
def living(fleet: Fleet) -> Pair:
    return Pair(fleet)


@pytest.fixture
def pair(living: Pair) -> tuple[Any, Any]:
    """A writer and a target that know each other."""
    return living.get()


def test_bytes_land_where_told_and_the_notification_follows(pair: tuple[Any, Any]) -> None:
    writer, target = pair
    writer.put(100, b"first")
    writer.put(5000, b"second")
    target.fill(0)
    local, there = [Span(100, 5), Span(5000, 6)], [Span(70_000, 5), Span(3, 6)]
    tag = bytes(range(256))  # any bytes, zeros too
    handle = writer.write(target.introduce().region, local, there, tag)
    assert end_of(writer, handle).state is TransferState.DONE
    wait_until(lambda: tag in target.received(), "the notification")
    assert target.peek(70_000, 5) == b"first"
    assert target.peek(3, 6) == b"second"
    assert target.peek(9, 64) == bytes(64)


def test_when_the_notification_is_there_so_are_the_bytes(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    writer, target = pair
    everything = blocks(fleet)
    for round_number in range(1, 21):
        writer.fill(round_number)
        tag = f"round {round_number}".encode()
        handle = writer.write(target.introduce().region, everything, everything, tag)
        poll = Poll(TransferState.PENDING)
        while tag not in target.received():
            if poll.state is TransferState.PENDING:  # polling is what sends the notification
                poll = writer.poll(handle)
        assert target.checksum() == writer.checksum()


def test_the_checksum_of_what_left_is_that_of_what_landed(pair: tuple[Any, Any]) -> None:
    writer, target = pair
    writer.fill(0)
    target.fill(1)
    writer.put(100, b"first")
    writer.put(9000, b"second")
    local, there = [Span(100, 5), Span(9000, 6)], [Span(70_000, 5), Span(3, 6)]
    handle = writer.write(target.introduce().region, local, there, b"summed")
    assert end_of(writer, handle).state is TransferState.DONE
    wait_until(lambda: b"summed" in target.received(), "the notification")
    assert target.checksum_of(there) == writer.checksum_of(local) == zlib.crc32(b"firstsecond")
    target.put(5, b"!")
    assert target.checksum_of(there) != writer.checksum_of(local)


def test_every_write_is_notified_once(pair: tuple[Any, Any]) -> None:
    writer, target = pair
    before = len(target.received())
    tags = [f"n{index}".encode() for index in range(50)]
    region = target.introduce().region
    handles = [writer.write(region, [Span(0, 64)], [Span(0, 64)], tag) for tag in tags]
    assert {end_of(writer, handle).state for handle in handles} == {TransferState.DONE}
    wait_until(lambda: len(target.received()) >= before + 50, "50 notifications")
    assert sorted(target.received()[before:]) == sorted(tags)


def test_10_000_descriptors(pair: tuple[Any, Any]) -> None:
    writer, target = pair
    order = list(range(10_000))
    random.Random(3).shuffle(order)
    data = random.Random(4).randbytes(10_000 * 64)
    wanted = bytearray(len(data))
    for index, place in enumerate(order):
        wanted[place * 64 : place * 64 + 64] = data[index * 64 : index * 64 + 64]
    writer.put(0, data)
    target.fill(0)
    local = [Span(index * 64, 64) for index in range(10_000)]
    there = [Span(place * 64, 64) for place in order]
    handle = writer.write(target.introduce().region, local, there, b"many")
    assert end_of(writer, handle).state is TransferState.DONE
    wait_until(lambda: b"many" in target.received(), "the notification")
    assert target.peek(0, len(data)) == wanted


def test_two_posting_threads_are_joined_by_the_union_of_their_notifications(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    writer, target = pair
    tail = NUM_BLOCKS - 4  # the last chunk is small, and often arrives before the first
    for round_number in range(6):
        writer.fill(100 + round_number)
        before = len(target.received())
        ranges = {b"0": (0, tail), b"1": (tail, NUM_BLOCKS - tail)}
        jobs = [Job(blocks(fleet, *run), blocks(fleet, *run), tag) for tag, run in ranges.items()]
        if round_number % 2:
            jobs.reverse()
        writer.start("write_on_two_threads", target.introduce(), *jobs)
        arrivals, num_seen = awaiting(0, NUM_BLOCKS), 0
        while not arrivals.is_complete:
            for tag in target.received()[before + num_seen :]:
                num_seen += 1
                arrivals = arrivals.add((0, 0), *ranges[tag])
        assert target.blocks(fleet.block_bytes) == [100 + round_number] * NUM_BLOCKS
        assert writer.finish("write_on_two_threads") == (TransferState.DONE, TransferState.DONE)


def test_an_abort_that_races_completion_never_harms_the_next_request(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    """An attempt is abandoned at a random point of its write. The next request gets other blocks
    at once, written by the same writer or by another; the abandoned ones are reused when settled,
    which is when their write is DONE."""
    first, target = pair
    second = fleet.start("second@1")
    second.add_peer(target.introduce())
    rng = random.Random(11)
    region, size = target.introduce().region, fleet.block_bytes
    target.fill(0)
    wanted = [0] * NUM_BLOCKS
    for attempt in range(200):
        abandoned, successor = (1 + attempt % 100, 101 + attempt % 100)
        start, split = rng.randrange(16), rng.randrange(17, 40)
        old, new = blocks(fleet, start, split - start), blocks(fleet, split, 4)
        first.fill(abandoned, old[0].offset, size * len(old))
        first.start("write", region, old, old, b"abandoned")
        time.sleep(rng.uniform(0.0, 0.002))  # the abort comes now
        writer = rng.choice((first, second))
        handle = first.finish("write") if writer is first else None
        writer.fill(successor, new[0].offset, size * len(new))
        tag = f"successor {attempt}".encode()
        next_handle = writer.write(region, new, new, tag)
        assert end_of(writer, next_handle).state is TransferState.DONE
        wait_until(lambda tag=tag: tag in target.received(), "the successor's notification")
        wanted[split : split + 4] = [successor] * 4
        assert target.blocks(size)[split : split + 4] == [successor] * 4
        settled = end_of(first, first.finish("write") if handle is None else handle)
        assert settled.state is TransferState.DONE
        wanted[start:split] = [abandoned] * (split - start)
    assert target.blocks(size) == wanted


def test_a_write_to_an_unknown_peer_is_refused_at_poll(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    writer, target = pair
    name = target.introduce().region.peer
    writer.remove_peer(name)
    poll = write_all(fleet, writer, target, b"nobody")
    assert poll.state is TransferState.REFUSED, "nothing was posted"
    assert name in poll.reason


def test_remove_and_add_again_works(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    writer, target = pair
    for round_number in range(3):
        writer.remove_peer(target.introduce().region.peer)
        writer.add_peer(target.introduce())
        writer.add_peer(target.introduce())  # of the same life: nothing new
        writer.fill(100 + round_number)
        assert write_all(fleet, writer, target, b"again").state is TransferState.DONE
        assert target.checksum() == writer.checksum()


def test_after_a_fence_the_old_address_is_a_sink_and_the_new_one_works(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    writer, target = pair
    old = target.introduce()
    target.fill(1)
    writer.fill(2)
    target.fence()
    everything = blocks(fleet)
    late = end_of(writer, writer.write(old.region, everything, everything, b"late"))
    assert late.state is TransferState.DONE, "a stale descriptor is not refused by the fabric"
    assert target.blocks(fleet.block_bytes) == [1] * NUM_BLOCKS
    new = target.introduce()
    assert new.region.generation == old.region.generation + 1
    writer.add_peer(new)
    late = end_of(writer, writer.write(old.region, everything, everything, b"late"))
    assert late.state is TransferState.DONE, "not by newer metadata either"
    assert target.blocks(fleet.block_bytes) == [1] * NUM_BLOCKS
    assert write_all(fleet, writer, target, b"fresh").state is TransferState.DONE
    assert target.checksum() == writer.checksum()
    stale = end_of(writer, writer.write(old.region, everything, everything, b"stale"))
    assert stale.state is TransferState.REFUSED, "a newer generation was used"
    assert f"generation {old.region.generation}" in stale.reason


def test_a_peer_that_restarts_is_another_peer(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    writer, _ = pair
    first, second = fleet.start("decode-0@boot1"), fleet.start("decode-0@boot2")
    writer.add_peer(first.introduce())
    writer.fill(5)
    assert write_all(fleet, writer, first, b"to the first").state is TransferState.DONE
    gone = first.introduce().region
    fleet.kill(first)
    writer.remove_peer(gone.peer)
    writer.add_peer(second.introduce())
    assert write_all(fleet, writer, second, b"to the second").state is TransferState.DONE
    assert second.checksum() == writer.checksum()
    everything = blocks(fleet)
    stale = end_of(writer, writer.write(gone, everything, everything, b"x"))
    assert stale.state is TransferState.REFUSED
    assert b"x" not in second.received()


def test_a_new_agent_under_a_known_name_replaces_the_old_one(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    writer, _ = pair
    first = fleet.start("renewed@1")
    writer.add_peer(first.introduce())
    writer.fill(6)
    assert write_all(fleet, writer, first, b"to the first").state is TransferState.DONE
    fleet.kill(first)
    second = fleet.start("renewed@1")
    writer.add_peer(second.introduce())
    assert write_all(fleet, writer, second, b"to the second").state is TransferState.DONE
    assert second.checksum() == writer.checksum()


def test_metadata_of_another_is_refused_and_harms_neither(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    writer, target = pair
    name = target.introduce().region.peer
    assert name in writer.refused_peer(name, writer.introduce().metadata)
    assert write_all(fleet, writer, target, b"still fine").state is TransferState.DONE


LAYOUT = KvLayout(
    model="m",
    block_size=16,
    num_kv_heads=2,
    head_dim=8,
    block_bytes=4096,
    layers=(LayerLayout(0, 2048, 1024, 64, KvDtype.F32),),
)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("version", {"version": LAYOUT.version + 1}),
        ("model", {"model": "n"}),
        ("block_size", {"block_size": 32}),
        ("num_kv_heads", {"num_kv_heads": 4}),
        ("head_dim", {"head_dim": 4}),
        ("num_layers", {"layers": LAYOUT.layers * 2}),
        ("dtype", {"layers": (LayerLayout(0, 2048, 1024, 64, KvDtype.BF16),)}),
        ("block_bytes", {"block_bytes": 8192}),
        ("fingerprint", {"layers": (LayerLayout(0, 2048, 1024, 32, KvDtype.F32),)}),
    ],
)
def test_another_layout_is_refused_before_any_write(
    fleet: Fleet, pair: tuple[Any, Any], field: str, change: dict[str, Any]
) -> None:
    """The writer's end of the protocol, over this transport's descriptors."""
    _, target = pair
    theirs = KvLayout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | change)
    terms = PrefillTerms(LAYOUT.summary(), LAYOUT.block_size, LAYOUT.block_bytes, try_s=1.0)
    before = target.received()
    state, effects = receive(ask_of(target, theirs), terms, 0.0, is_settled=False)
    assert state is None
    told, forgotten = effects  # and no push
    assert isinstance(told, Tell)
    assert isinstance(told.message, HandoffRefused)
    assert f"layout.{field}: " in told.message.message
    assert isinstance(forgotten, Forget)
    assert target.received() == before
    state, effects = receive(ask_of(target, LAYOUT), terms, 0.0, is_settled=False)
    assert state is not None, "the same layout is taken"
    assert [type(effect) for effect in effects] == [Compute]


def ask_of(target: Any, layout: KvLayout) -> PrefillAsk:
    told = target.introduce()
    region = RegionDescriptor(
        worker_id=WorkerId("target"),
        boot=Boot("1"),
        generation=told.region.generation,
        address=told.region.address,
        num_bytes=told.region.num_bytes,
        block_bytes=layout.block_bytes,
        layout=layout.summary(),
        metadata=told.metadata,
    )
    request = EngineRequest(RequestId("r"), (1,), SamplingParams())
    blocks_asked = (BlockRun(BlockId(0), 1),)
    return PrefillAsk(HandoffId(RequestId("r"), Attempt(1, 1)), request, 0, blocks_asked, region, 9)


SEEN = {Backend.INPROCESS: "inprocess", Backend.CMA: "ucx (cma)", Backend.TCP: "ucx (tcp)"}


def test_health_says_what_carries_the_bytes(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    writer, target = pair
    write_all(fleet, writer, target, b"large")
    assert writer.health() == SEEN[fleet.backend]


def test_small_writes_tell_what_carries_them_too(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    _, target = pair
    writer = fleet.start("small@1")
    writer.add_peer(target.introduce())
    block = [Span(0, 4096)]
    for tag in (b"first may connect", b"likely", b"certain"):
        handle = writer.write(target.introduce().region, block, block, tag)
        assert end_of(writer, handle).state is TransferState.DONE
    assert writer.health() == SEEN[fleet.backend]
