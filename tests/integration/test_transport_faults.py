"""Peers that die and freeze in mid-transfer: processes over NIXL, and the in-process fabric."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.transport import Span, TransferState
from tests.fabric_agents import wait_until
from tests.fabric_fleet import (
    NUM_BLOCKS,
    Backend,
    Deed,
    Fleet,
    Pair,
    blocks,
    end_of,
    open_fleet,
    write_all,
)

BLOCK_BYTES = 1 << 20
OLD, NEW, REUSED = 0x11, 0x22, 0x33
ENDED = {TransferState.DONE, TransferState.FAILED}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(params=list(Backend), scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with open_fleet(request.param, block_bytes=BLOCK_BYTES) as opened:
        yield opened


@pytest.fixture(scope="module")
def living(fleet: Fleet) -> Pair:
    return Pair(fleet)


@pytest.fixture
def pair(living: Pair) -> tuple[Any, Any]:
    """A writer full of NEW that is connected to a target full of OLD."""
    writer, target = living.get()
    connect(writer, target)
    writer.fill(NEW)
    target.fill(OLD)
    return writer, target


def connect(writer: Any, target: Any) -> None:
    little = [Span(0, 1)]
    handle = writer.write(target.introduce().region, little, little, b"connect")
    assert end_of(writer, handle).state is TransferState.DONE


def num_landed(fleet: Fleet, target: Any) -> int:
    """Return how many blocks at the target are full of NEW."""
    return target.blocks(fleet.block_bytes).count(NEW)


def strike_in_mid_write(fleet: Fleet, deed: Deed, pair: tuple[Any, Any], victim: Any) -> None:
    """Begin to write everything, and have a process struck in the middle; `finish("write")` of a
    writer that lives must follow."""
    writer, target = pair
    everything = blocks(fleet)
    region = target.introduce().region
    fleet.strike(deed, victim, when=NEW, lands_at=target)
    writer.start("write", region, everything, everything, b"struck")
    fleet.await_strike(deed, victim)


def fence_in_mid_write(fleet: Fleet, pair: tuple[Any, Any], victim: Any) -> int:
    """Fence the target while `victim` is frozen in the middle of a write, thaw, and return how many
    blocks had landed before. The write has ended then, and so has everything late."""
    writer, target = pair
    before = len(target.received())
    strike_in_mid_write(fleet, Deed.FREEZE, pair, victim)
    if victim is target:
        target.start("fence")  # it finds this when it wakes
        fleet.thaw(target)
        target.finish("fence")
    else:
        target.fence()
    time.sleep(0.02)  # the rule: reuse blocks 20 ms after a fence
    fenced, pool = num_landed(fleet, target), target.checksum()
    fleet.thaw(victim)
    assert end_of(writer, writer.finish("write")).state is TransferState.DONE, "it never knew"
    wait_until(lambda: len(target.received()) > before, "the notification of the late write")
    assert target.checksum() == pool, "late bytes in the pool"
    return fenced


@pytest.mark.parametrize("frozen", ["writer", "target"])
def test_a_fence_keeps_late_bytes_of_the_thawed_out(
    fleet: Fleet, pair: tuple[Any, Any], frozen: str
) -> None:
    writer, target = pair
    old = target.introduce().region
    _, huge_before = resident(fleet, target, old.address)
    for _ in range(20):
        landed = fence_in_mid_write(fleet, pair, writer if frozen == "writer" else target)
        writer.add_peer(target.introduce())
        if landed < NUM_BLOCKS:
            break  # else it was too quick for us: nothing was late
        assert (fleet.backend, frozen) != (Backend.INPROCESS, "writer")
        if (fleet.backend, frozen) == (Backend.CMA, "target"):
            break  # the writer's kernel needs no target's process: all landed before the fence
        target.fill(OLD)
    else:
        pytest.fail("nobody could be frozen in mid-transfer")
    moved = target.introduce().region
    assert moved.address != old.address
    _, huge_after = resident(fleet, target, moved.address)
    assert huge_after == huge_before, "the fence moved huge pages as such"
    assert write_all(fleet, writer, target, b"after").state is TransferState.DONE
    assert target.checksum() == writer.checksum()


def resident(fleet: Fleet, agent: Any, address: int) -> tuple[int, int]:
    """Return the kilobytes of a mapping that have pages, and those on huge ones."""
    if fleet.backend is Backend.INPROCESS:
        return 0, 0
    kilobytes, huge = agent.resident_kilobytes(address)
    return kilobytes, huge


def test_what_lands_in_a_sink_is_given_back_and_the_sinks_end_with_their_last_writer(
    fleet: Fleet, pair: tuple[Any, Any], living: Pair
) -> None:
    writer, target = pair
    target.release_sinks()  # those of other cases, whose writes have ended
    address = target.introduce().region.address
    for _ in range(20):
        if fence_in_mid_write(fleet, pair, writer) < NUM_BLOCKS:
            break
        target.fill(OLD)
        writer.add_peer(target.introduce())
        address = target.introduce().region.address
    num_sinks = target.num_sinks()
    late, _ = resident(fleet, target, address)
    assert late > 0 or fleet.backend is Backend.INPROCESS, "the sink took what was late"
    target.fence()
    assert resident(fleet, target, address)[0] == 0, "the next fence empties the sinks"
    assert target.num_sinks() == num_sinks + 1, "that writer may write there again"
    fleet.kill(writer)
    heir, _ = living.get()
    time.sleep(0.1)  # what a dead writer had buffered has landed
    target.release_sinks()
    assert target.num_sinks() == 0
    heir.fill(REUSED)
    assert write_all(fleet, heir, target, b"heir").state is TransferState.DONE
    assert target.checksum() == heir.checksum()


def test_a_target_killed_in_mid_write_fails_it_and_its_next_boot_is_written_to(
    fleet: Fleet, pair: tuple[Any, Any], living: Pair
) -> None:
    writer, target = pair
    region, everything = target.introduce().region, blocks(fleet)
    strike_in_mid_write(fleet, Deed.KILL, pair, target)
    first = end_of(writer, writer.finish("write"))
    assert first.state in ENDED, "DONE where all bytes were there before"
    again = end_of(writer, writer.write(region, everything, everything, b"to nobody"))
    assert again.state is TransferState.FAILED
    writer.remove_peer(region.peer)
    _, heir = living.get()
    assert write_all(fleet, writer, heir, b"to the next boot").state is TransferState.DONE
    assert heir.checksum() == writer.checksum()


def test_all_writes_to_a_killed_peer_end_also_one_posted_among_them(
    fleet: Fleet, pair: tuple[Any, Any], living: Pair
) -> None:
    writer, target = pair
    everything, one = blocks(fleet), blocks(fleet, 0, 1)
    region = target.introduce().region
    target.set_polling(False)
    handles = [writer.write(region, everything, everything, b"pending") for _ in range(3)]
    fleet.kill(target)
    assert end_of(writer, handles.pop()).state in ENDED
    retry = writer.write(region, one, one, b"over the old connection")
    assert end_of(writer, retry).state is TransferState.FAILED
    assert {end_of(writer, handle).state for handle in handles} <= ENDED
    writer.remove_peer(region.peer)
    _, heir = living.get()
    assert write_all(fleet, writer, heir, b"on a fresh one").state is TransferState.DONE
    assert heir.checksum() == writer.checksum()


def test_bytes_of_a_killed_writer_land_in_quarantined_blocks_only(
    fleet: Fleet, pair: tuple[Any, Any], living: Pair
) -> None:
    _, target = pair
    half = NUM_BLOCKS // 2
    quarantined, free = blocks(fleet, 0, half), blocks(fleet, half, half)
    region = target.introduce().region
    before, tag = kill_with_buffered_bytes(fleet, pair, living, quarantined)
    heir, _ = living.get()
    heir.fill(REUSED)
    handle = heir.write(region, free, free, b"at once into others")
    target.set_polling(True)
    assert end_of(heir, handle).state is TransferState.DONE
    wait_until(lambda: b"at once into others" in target.received(), "the notification")
    time.sleep(0.2)  # no event says that nothing comes any more
    landed = target.blocks(fleet.block_bytes)
    assert landed[half:] == [REUSED] * half
    assert REUSED not in landed[:half]
    if fleet.backend is not Backend.CMA:  # its copies end with the process that makes them
        assert landed[:half] != before[:half], "something was late"
    assert tag not in target.received(), "it never notified"
    target.fence()  # ends the quarantine
    target.fill(OLD, 0, half * fleet.block_bytes)
    heir.add_peer(target.introduce())
    time.sleep(0.1)
    assert target.blocks(fleet.block_bytes) == [OLD] * half + [REUSED] * half


def kill_with_buffered_bytes(
    fleet: Fleet, pair: tuple[Any, Any], living: Pair, quarantined: list[Span]
) -> tuple[list[int], bytes]:
    """Kill the writer in the middle of a write; return the target's blocks as they are then, and
    what the write was to notify. Over TCP the target does not poll meanwhile, so that what the
    kernels have taken is late. CMA's copy may end before the kill: then another writer tries."""
    writer, target = pair
    region = target.introduce().region
    if fleet.backend is Backend.TCP:
        target.set_polling(False)
        writer.start("write", region, quarantined, quarantined, b"half")
        time.sleep(0.1)  # until the sockets are full
        fleet.kill(writer)
        return target.blocks(fleet.block_bytes), b"half"
    # The last block is written after all others were, often; it tells that the copy had not ended.
    spans = [*quarantined[:-1] * (16 if fleet.backend is Backend.CMA else 1), quarantined[-1]]
    for number in range(20):
        tag = b"half %d" % number
        fleet.strike(Deed.KILL, writer, when=NEW, lands_at=target)
        writer.start("write", region, spans, spans, tag)
        fleet.await_strike(Deed.KILL, writer)
        landed: list[int] = target.blocks(fleet.block_bytes)
        if landed[len(quarantined) - 1] != NEW:
            return landed, tag
        writer, _ = living.get()
        target.fill(OLD)
        writer.fill(NEW)
    pytest.fail("nobody could be killed in mid-transfer")


def test_a_frozen_target_leaves_the_write_pending_and_the_writer_free(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    writer, target = pair
    stranger = fleet.start(
        "stranger@1"
    )  # not connected: needs the target's answer on any transport
    introduction, everything = target.introduce(), blocks(fleet)
    stranger.add_peer(introduction)
    stranger.fill(NEW)
    fleet.freeze(target)
    handle = stranger.write(introduction.region, everything, everything, b"patience")
    time.sleep(0.3)
    assert stranger.poll(handle).state is TransferState.PENDING
    stranger.add_peer(writer.introduce())
    assert write_all(fleet, stranger, writer, b"o").state is TransferState.DONE, (
        "others are not held up"
    )
    fleet.thaw(target)
    assert end_of(stranger, handle).state is TransferState.DONE
    wait_until(lambda: b"patience" in target.received(), "the notification")


def test_newer_metadata_of_a_peer_leaves_the_writes_to_it_alone(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    writer, target = pair
    region, everything = target.introduce().region, blocks(fleet)
    handles = [writer.write(region, everything, everything, b"under way") for _ in range(2)]
    target.fence()
    writer.add_peer(target.introduce())  # as when the next ask brings it
    assert {end_of(writer, handle).state for handle in handles} == {TransferState.DONE}, (
        "FAILED would never settle, and hold the source blocks until the agent is destroyed"
    )
    assert write_all(fleet, writer, target, b"fresh").state is TransferState.DONE
    wait_until(lambda: b"fresh" in target.received(), "the notification")
    assert target.checksum() == writer.checksum()


def test_a_peer_can_be_removed_while_a_write_to_it_is_under_way(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    writer, target = pair
    everything = blocks(fleet)
    handle = writer.write(target.introduce().region, everything, everything, b"cut off")
    writer.remove_peer(target.introduce().region.peer)
    assert end_of(writer, handle).state in ENDED
    writer.add_peer(target.introduce())
    assert write_all(fleet, writer, target, b"again").state is TransferState.DONE


def test_a_destroyed_agent_reads_our_memory_no_more(fleet: Fleet, pair: tuple[Any, Any]) -> None:
    _, target = pair
    stranger = fleet.start("destroyed@1")
    introduction, everything = target.introduce(), blocks(fleet)
    stranger.add_peer(introduction)
    fleet.freeze(target)
    stranger.write(introduction.region, everything, everything, b"never")
    stranger.close()  # asserts, by its deadline, that it does not hang
    stranger.fill(REUSED)
    fleet.thaw(target)
    time.sleep(0.3)  # no event says that nothing comes
    assert REUSED not in target.blocks(fleet.block_bytes)
    assert b"never" not in target.received()


def test_an_agent_that_is_still_connecting_can_be_destroyed(
    fleet: Fleet, pair: tuple[Any, Any]
) -> None:
    """UCX ended the writer's process in half of such cases."""
    writer, target = pair
    writer.destroy_while_connecting(target.introduce(), 6)
    assert write_all(fleet, writer, target, b"after").state is TransferState.DONE
