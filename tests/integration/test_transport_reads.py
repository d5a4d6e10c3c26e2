"""What every transport owes its callers for reads, on real processes over NIXL and inside one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.transport import Poll, Span, TransferState
from tests.fabric_agents import wait_until
from tests.fabric_fleet import (
    NUM_BLOCKS,
    TRIGGER_BLOCK,
    Backend,
    Deed,
    Fleet,
    Pair,
    backends,
    blocks,
    end_of,
    open_fleet,
    read_all,
    write_all,
)

BLOCK_BYTES = 1 << 20
OLD, NEW = 0x11, 0x22


@pytest.fixture(params=list(Backend), scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with open_fleet(request.param, block_bytes=BLOCK_BYTES) as opened:
        yield opened


@pytest.fixture(scope="module")
def living(fleet: Fleet) -> Pair:
    return Pair(fleet)


@pytest.fixture
def pair(living: Pair) -> tuple[Any, Any]:
    """A reader full of OLD and a source full of NEW that know each other."""
    reader, source = living.get()
    reader.fill(OLD)
    source.fill(NEW)
    return reader, source


def test_bytes_come_from_where_told_and_nobody_is_notified(pair: tuple[Any, Any]) -> None:
    reader, source = pair
    source.put(70_000, b"first")
    source.put(3, b"second")
    before = source.received()
    there, local = [Span(70_000, 5), Span(3, 6)], [Span(100, 5), Span(5000, 6)]
    handle = reader.read(source.introduce().region, local, there)
    assert end_of(reader, handle) == Poll(TransferState.DONE)
    assert reader.peek(100, 6) == b"first" + bytes([OLD])
    assert reader.peek(5000, 7) == b"second" + bytes([OLD])
    assert source.received() == before
    assert source.peek(3, 6) == b"second"


def test_whole_regions_and_10_000_descriptors(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    reader, source = pair
    source.put(0, random.Random(4).randbytes(10_000 * 64))
    assert read_all(fleet, reader, source).state is TransferState.DONE
    assert reader.checksum() == source.checksum()
    places = list(range(10_000))
    random.Random(3).shuffle(places)
    reader.fill(OLD)
    there = [Span(place * 64, 64) for place in places]
    handle = reader.read(source.introduce().region, there, there)
    assert end_of(reader, handle).state is TransferState.DONE
    assert reader.peek(0, 640_000) == source.peek(0, 640_000)


def test_reads_and_writes_of_one_pair_run_at_the_same_time(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    reader, source = pair
    region, half = source.introduce().region, NUM_BLOCKS // 2
    mine, theirs = blocks(fleet, 0, half), blocks(fleet, half, half)
    handles = [reader.read(region, theirs, theirs), reader.write(region, mine, mine, b"swap")]
    assert [end_of(reader, handle).state for handle in handles] == [TransferState.DONE] * 2
    wait_until(lambda: b"swap" in source.received(), "the notification")
    for agent in (reader, source):
        assert agent.blocks(fleet.block_bytes) == [OLD] * half + [NEW] * half


def test_many_reads_under_way_all_end(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    reader, source = pair
    region, one = source.introduce().region, blocks(fleet, 0, 1)
    handles = [reader.read(region, one, one) for _ in range(100)]
    assert {end_of(reader, handle).state for handle in handles} == {TransferState.DONE}


def test_what_was_never_registered_and_who_is_not_known_cannot_be_read(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    reader, source = pair
    reader.remove_peer(source.introduce().region.peer)
    poll = read_all(fleet, reader, source)
    assert poll.state is TransferState.REFUSED
    assert "unknown peer" in poll.reason
    reader.add_peer(source.introduce())
    source.fence()  # no longer where the reader has learnt it
    assert read_all(fleet, reader, source).state is TransferState.FAILED
    assert reader.blocks(fleet.block_bytes) == [OLD] * NUM_BLOCKS


def test_a_source_that_moved_is_refused_whether_the_reader_knows_it_or_not(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    reader, source = pair
    old, everything = source.introduce(), blocks(fleet)
    source.fence()
    poll = end_of(reader, reader.read(old.region, everything, everything))
    assert poll.state is TransferState.REFUSED, "it read the sink's zeros"
    assert "moved" in poll.reason
    reader.add_peer(source.introduce())
    assert read_all(fleet, reader, source).state is TransferState.DONE
    assert reader.blocks(fleet.block_bytes) == [NEW] * NUM_BLOCKS
    stale = end_of(reader, reader.read(old.region, everything, everything))
    assert stale.state is TransferState.REFUSED
    assert reader.blocks(fleet.block_bytes) == [NEW] * NUM_BLOCKS, "not even posted"


def test_a_late_write_into_the_sink_forges_no_seal(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    reader, source = pair
    old, everything = source.introduce(), blocks(fleet)
    source.fence()
    late = reader.write(old.region, everything, everything, b"late")
    assert end_of(reader, late).state is TransferState.DONE
    poll = end_of(reader, reader.read(old.region, everything, everything))
    assert poll.state is TransferState.REFUSED


def test_a_source_that_moves_under_a_read_is_refused(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    """The reader stands still in the middle, the source is fenced, and the rest would be zeros."""
    reader, source = pair
    assert read_all(fleet, reader, source).state is TransferState.DONE, "connected"
    everything = blocks(fleet)
    for _ in range(20):
        reader.fill(OLD)
        reader.add_peer(source.introduce())
        fleet.strike(Deed.FREEZE, reader, when=NEW, lands_at=reader)
        reader.start("read", source.introduce().region, everything, everything)
        fleet.await_strike(Deed.FREEZE, reader)
        source.fence()
        fleet.thaw(reader)
        if end_of(reader, reader.finish("read")).state is TransferState.REFUSED:
            return
        landed = reader.blocks(fleet.block_bytes)
        assert landed == [NEW] * NUM_BLOCKS, "DONE says that every byte was the source's"
    pytest.fail("the reader could not be frozen in the middle of a read")


def test_a_region_that_moves_under_its_own_read_is_refused(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    reader, source = pair
    everything = blocks(fleet)
    assert read_all(fleet, reader, source).state is TransferState.DONE, "connected"
    source.set_polling(False)
    handle = reader.read(source.introduce().region, everything, everything)
    reader.fence()
    source.set_polling(True)
    poll = end_of(reader, handle)
    if fleet.backend is Backend.CMA:  # over before the fence: posting is the copy
        assert poll.state is TransferState.DONE
        assert reader.blocks(fleet.block_bytes) == [NEW] * NUM_BLOCKS
    else:
        assert poll.state is TransferState.REFUSED


@backends(
    without={
        Backend.INPROCESS: "its events happen when anybody looks",
        Backend.CMA: "the kernel copies on the reader's own time: it needs nobody's polls",
    }
)
def test_a_read_makes_progress_by_its_sources_polls(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    reader, source = pair
    assert read_all(fleet, reader, source).state is TransferState.DONE, "connected"
    source.set_polling(False)
    everything = blocks(fleet)
    handle = reader.read(source.introduce().region, everything, everything)
    time.sleep(0.1)
    assert reader.poll(handle).state is TransferState.PENDING
    source.set_polling(True)
    assert end_of(reader, handle).state is TransferState.DONE


def test_a_frozen_source_is_read_after_its_thaw_at_the_latest(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    reader, source = pair
    assert read_all(fleet, reader, source).state is TransferState.DONE, "connected"
    reader.fill(OLD)
    everything = blocks(fleet)
    region = source.introduce().region
    fleet.freeze(source)
    handle = reader.read(region, everything, everything)
    if fleet.backend is not Backend.CMA:
        time.sleep(0.1)
        assert reader.poll(handle).state is TransferState.PENDING
        fleet.thaw(source)
    assert end_of(reader, handle).state is TransferState.DONE
    fleet.thaw(source)
    assert reader.blocks(fleet.block_bytes) == [NEW] * NUM_BLOCKS


def test_a_destroyed_agent_reads_into_our_memory_no_more(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    _, source = pair
    stranger = fleet.start("destroyed@1")  # not connected: needs the source's answer anyhow
    everything, region = blocks(fleet), source.introduce().region
    stranger.add_peer(source.introduce())
    fleet.freeze(source)
    stranger.read(region, everything, everything)
    stranger.close()
    stranger.fill(OLD)
    fleet.thaw(source)
    time.sleep(0.2)  # no event says that nothing comes
    assert stranger.blocks(fleet.block_bytes) == [OLD] * NUM_BLOCKS


def test_a_source_killed_under_a_read_fails_it_and_the_reader_lives(
    fleet: Fleet, pair: tuple[Any, Any], living: Pair
) -> None:
    reader, source = pair
    region, everything = source.introduce().region, blocks(fleet)
    fleet.strike(Deed.KILL, source, when=NEW, lands_at=reader)
    reader.start("read", region, everything, everything)
    fleet.await_strike(Deed.KILL, source)
    poll = end_of(reader, reader.finish("read"))
    landed = reader.blocks(fleet.block_bytes)
    assert landed[TRIGGER_BLOCK] != OLD
    is_whole = landed == [NEW] * NUM_BLOCKS
    assert poll.state is TransferState.FAILED or (is_whole and poll.state is TransferState.DONE)
    again = end_of(reader, reader.read(region, everything, everything))
    assert again.state is TransferState.FAILED
    reader, heir = living.get()
    heir.fill(NEW + 1)
    assert read_all(fleet, reader, heir).state is TransferState.DONE
    assert write_all(fleet, reader, heir, b"and back").state is TransferState.DONE
    assert reader.blocks(fleet.block_bytes) == [NEW + 1] * NUM_BLOCKS
