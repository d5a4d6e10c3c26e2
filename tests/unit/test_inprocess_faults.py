"""The in-process fabric's faults, each as the real fabric was seen to behave."""

from __future__ import annotations

import random

import pytest

from core.clock import ManualClock
from core.errors import FabricError
from core.ids import Boot
from core.memory_region import SEAL_BYTES
from kv_transfer.bytes_region import BytesRegion
from kv_transfer.inprocess.model import FabricEvent, Faults, Frozen, Kind
from kv_transfer.inprocess.transport import InProcessFabric, InProcessTransport
from kv_transfer.transport import PeerName, Poll, RemoteRegion, Span, TransferHandle, TransferState

P, D = PeerName("prefill@1"), PeerName("decode@1")
NUM_BYTES = 64
BLOCKS = [Span(index * 8, 8) for index in range(8)]
PENDING = Poll(TransferState.PENDING)
DONE = Poll(TransferState.DONE)


class World:
    """A prefill agent full of ones that knows a decode agent full of zeros; an event a second."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.clock = ManualClock()
        self.log: list[FabricEvent] = []
        self.fabric = InProcessFabric(
            now=self.clock.now,
            rng=random.Random(1),
            faults=faults or Faults(min_delay_s=1.0, max_delay_s=1.0),
            on_event=self.log.append,
        )
        self.source, self.target = BytesRegion(NUM_BYTES), BytesRegion(NUM_BYTES)
        self.source.view()[:] = b"\1" * NUM_BYTES
        self.prefill = self.fabric.transport(P)
        self.decode = self.fabric.transport(D)
        self.prefill.register(self.source)
        self.decode.register(self.target)
        self.prefill.add_peer(D, self.decode.metadata())

    def remote(self) -> RemoteRegion:
        region = self.target
        return RemoteRegion(D, Boot("1"), region.address, region.num_bytes, region.generation)

    def write(self) -> TransferHandle:
        return self.prefill.write(self.remote(), BLOCKS, BLOCKS, b"tag")

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.fabric.step()

    def landed(self) -> int:
        return sum(self.target.view()) // 8

    def kinds(self) -> list[Kind]:
        return [event.kind for event in self.log]


@pytest.fixture
def world() -> World:
    return World()


def test_each_descriptor_lands_by_itself_then_the_notification_then_done(world: World) -> None:
    handle = world.write()
    for second in range(1, 9):
        world.run(1)
        assert world.landed() == second
        assert world.decode.notifications() == []
    world.run(1)
    assert [n.payload for n in world.decode.notifications()] == [b"tag"]
    assert world.prefill.poll(handle) == PENDING
    world.run(1)
    assert world.prefill.poll(handle) == DONE
    assert world.kinds() == [Kind.POSTED, *[Kind.LANDED] * 8, Kind.NOTIFIED, Kind.DONE]
    assert sorted(event.index for event in world.log if event.kind is Kind.LANDED) == [*range(8)]
    assert world.fabric.next_at() is None


def test_the_source_is_read_when_a_descriptor_lands(world: World) -> None:
    world.write()
    world.run(3)
    world.source.view()[:] = b"\0" * NUM_BYTES  # freed too early, and reused
    world.run(10)
    assert world.landed() == 3, "the corruption shows"


def test_a_frozen_process_whose_hardware_goes_on_still_writes(world: World) -> None:
    handle = world.write()
    world.run(2)
    world.fabric.freeze(P, Frozen.PROCESS)
    world.run(20)
    assert world.landed() == 8
    assert world.decode.notifications() == [], "its software sends that"
    world.fabric.thaw(P)
    world.run(2)
    assert len(world.decode.notifications()) == 1
    assert world.prefill.poll(handle) == DONE


@pytest.mark.parametrize("name", [P, D])
def test_all_frozen_lands_nothing_until_the_thaw(world: World, name: PeerName) -> None:
    handle = world.write()
    world.run(2)
    world.fabric.freeze(name, Frozen.ALL)
    world.run(100)
    assert world.landed() == 2
    assert world.prefill.poll(handle) == PENDING
    world.fabric.thaw(name)
    world.run(8)
    assert world.landed() == 8
    assert world.prefill.poll(handle) == DONE


def test_a_fence_sends_a_thawed_peers_late_bytes_into_the_sink(world: World) -> None:
    handle = world.write()
    world.run(2)
    world.fabric.freeze(P, Frozen.ALL)
    world.run(1)
    stale = world.remote()
    world.target.fence()
    world.decode.register(world.target)
    world.fabric.thaw(P)
    world.run(20)
    assert world.landed() == 2
    assert world.prefill.poll(handle) == DONE, "it never knew"
    world.prefill.add_peer(D, world.decode.metadata())
    again = world.prefill.write(stale, BLOCKS, BLOCKS, b"stale")
    world.run(10)
    assert world.prefill.poll(again) == DONE, "of one life, old addresses stay known"
    assert world.landed() == 2


def test_a_partition_towards_the_target_stops_bytes(world: World) -> None:
    world.write()
    world.run(3)
    world.fabric.cut(P, D)
    world.run(50)
    assert world.landed() == 3
    world.fabric.heal(P, D)
    world.run(7)
    assert world.landed() == 8
    assert len(world.decode.notifications()) == 1


def test_a_partition_towards_the_writer_hides_that_it_is_done(world: World) -> None:
    handle = world.write()
    world.fabric.cut(D, P)
    world.run(50)
    assert world.landed() == 8
    assert len(world.decode.notifications()) == 1
    assert world.prefill.poll(handle) == PENDING
    world.fabric.heal(D, P)
    world.run(1)
    assert world.prefill.poll(handle) == DONE


@pytest.mark.parametrize(
    ("buffered", "total", "notified"), [(0, 2, 0), (3, 5, 0), (6, 8, 0), (7, 8, 1)]
)
def test_a_killed_writers_buffered_bytes_land(
    world: World, buffered: int, total: int, notified: int
) -> None:
    world.write()
    world.run(2)
    world.fabric.kill(P, buffered_descriptors=buffered)
    world.source.view()[:] = b"\0" * NUM_BYTES  # the buffers hold what was there
    world.run(20)
    assert world.landed() == total
    assert len(world.decode.notifications()) == notified


def test_a_killed_target_fails_the_write(world: World) -> None:
    handle = world.write()
    world.run(2)
    world.fabric.kill(D)
    world.run(1)
    assert world.prefill.poll(handle).state is TransferState.FAILED
    assert world.landed() == 2
    later = world.write()
    assert "RemoteDisconnect" in world.prefill.poll(later).reason


def test_a_frozen_target_that_is_killed_fails_the_write(world: World) -> None:
    handle = world.write()
    world.fabric.freeze(D, Frozen.ALL)
    world.run(2)
    world.fabric.kill(D)
    world.run(1)
    assert world.prefill.poll(handle).state is TransferState.FAILED


def test_a_closed_agent_writes_no_more(world: World) -> None:
    world.write()
    world.run(2)
    world.prefill.close()
    world.prefill.close()
    world.run(20)
    assert world.landed() == 2
    assert not world.prefill.health().ok
    with pytest.raises(FabricError, match="after close"):
        world.write()


def test_removing_a_peer_stops_no_write_under_way(world: World) -> None:
    world.write()
    world.run(1)
    world.prefill.remove_peer(D)
    world.run(9)
    assert world.landed() == 8


def test_a_lost_descriptor_fails_the_write_without_notification() -> None:
    world = World(Faults(min_delay_s=1.0, max_delay_s=1.0, loss=1.0))
    handle = world.write()
    world.run(20)
    assert world.prefill.poll(handle).state is TransferState.FAILED
    assert (world.landed(), world.decode.notifications()) == (0, [])


def test_a_lost_notification_is_known_to_nobody() -> None:
    world = World(Faults(notification_loss=1.0))
    handle = world.write()
    assert world.prefill.poll(handle) == DONE
    assert (world.landed(), world.decode.notifications()) == (8, [])


def test_corruption_inverts_one_byte_a_descriptor() -> None:
    world = World(Faults(corruption=1.0))
    handle = world.write()
    assert world.prefill.poll(handle) == DONE
    for block in BLOCKS:
        landed = bytes(world.target.view()[block.offset : block.offset + 8])
        assert sorted(landed) == [1] * 7 + [0xFE]


def test_names_are_unique_among_the_living_and_lives_are_told_apart(world: World) -> None:
    with pytest.raises(FabricError, match="alive"):
        world.fabric.transport(D)
    world.fabric.kill(D)
    reborn = world.fabric.transport(D)
    reborn.register(BytesRegion(NUM_BYTES))
    assert world.prefill.poll(world.write()).state is TransferState.FAILED, (
        "metadata of the dead one"
    )
    world.prefill.add_peer(D, reborn.metadata())
    world.run(1)
    assert world.prefill.poll(world.write()) == PENDING


def test_metadata_is_checked(world: World) -> None:
    with pytest.raises(FabricError, match="not understood"):
        world.prefill.add_peer(D, b"nonsense")
    with pytest.raises(FabricError, match="was given for"):
        world.prefill.add_peer(P, world.decode.metadata())


def test_calls_out_of_order_are_refused() -> None:
    clock = ManualClock()
    fabric = InProcessFabric(now=clock.now, rng=random.Random(0))
    bare: InProcessTransport = fabric.transport(P)
    with pytest.raises(FabricError, match="before register"):
        bare.metadata()
    with pytest.raises(FabricError, match="before register"):
        bare.checksum([])
    with pytest.raises(FabricError, match="before register"):
        bare.write(RemoteRegion(D, Boot("1"), 0, 8, 0), BLOCKS[:1], BLOCKS[:1], b"t")


@pytest.mark.parametrize("arguments", [([], [], b"tag"), (BLOCKS, BLOCKS, b"")])
def test_a_write_of_nothing_and_one_without_tag_are_refused(
    world: World, arguments: tuple[list[Span], list[Span], bytes]
) -> None:
    with pytest.raises(ValueError, match=r"spans: none|tag is empty"):
        world.prefill.write(world.remote(), *arguments)


# --- reads ----------------------------------------------------------------------------------------


class ReadWorld(World):
    """The decode agent is read by the prefill agent: zeros, into ones."""

    def read(self) -> TransferHandle:
        return self.prefill.read(self.remote(), BLOCKS, BLOCKS)

    def num_read(self) -> int:
        return 8 - sum(self.source.view()) // 8


@pytest.fixture
def reads() -> ReadWorld:
    return ReadWorld()


def test_a_reads_descriptors_land_one_by_one_then_the_look_at_the_seal_then_done(
    reads: ReadWorld,
) -> None:
    handle = reads.read()
    for second in range(1, 9):
        reads.run(1)
        assert reads.num_read() == second
    reads.run(1)
    assert reads.prefill.poll(handle) == PENDING
    reads.run(1)
    assert reads.prefill.poll(handle) == DONE
    assert reads.kinds() == [Kind.POSTED, *[Kind.LANDED] * 8, Kind.DONE]
    assert {(event.source, event.target) for event in reads.log} == {(D, P)}
    assert reads.decode.notifications() == []


@pytest.mark.parametrize("after", [0, 3, 8])
def test_a_source_that_moves_at_any_point_of_a_read_refuses_it(
    reads: ReadWorld, after: int
) -> None:
    handle = reads.read()
    reads.run(after)
    reads.target.fence()
    reads.run(20)
    poll = reads.prefill.poll(handle)
    assert (poll.state, poll.reason) == (
        TransferState.REFUSED,
        "the source moved: no longer generation 0",
    )
    assert reads.kinds()[-1] is Kind.REFUSED


def test_a_region_that_moves_under_its_own_read_refuses_it(reads: ReadWorld) -> None:
    handle = reads.read()
    reads.run(3)
    reads.source.fence()
    reads.run(20)
    assert "here moved" in reads.prefill.poll(handle).reason


def test_a_fence_after_the_look_changes_nothing(reads: ReadWorld) -> None:
    handle = reads.read()
    reads.run(9)
    reads.target.fence()
    reads.run(1)
    assert reads.prefill.poll(handle) == DONE


@pytest.mark.parametrize("name", [P, D])
def test_a_read_stands_still_with_either_end_and_goes_on(reads: ReadWorld, name: PeerName) -> None:
    handle = reads.read()
    reads.run(2)
    reads.fabric.freeze(name, Frozen.ALL)
    reads.run(100)
    assert reads.num_read() == 2
    reads.fabric.thaw(name)
    reads.run(8)
    assert reads.prefill.poll(handle) == DONE


def test_a_frozen_source_whose_hardware_goes_on_is_read(reads: ReadWorld) -> None:
    reads.fabric.freeze(D, Frozen.PROCESS)
    handle = reads.read()
    reads.run(10)
    assert reads.prefill.poll(handle) == DONE


@pytest.mark.parametrize("ends", [(P, D), (D, P)])
def test_a_read_needs_both_directions(reads: ReadWorld, ends: tuple[PeerName, PeerName]) -> None:
    handle = reads.read()
    reads.run(2)
    reads.fabric.cut(*ends)
    reads.run(20)
    assert reads.num_read() == 2
    reads.fabric.heal(*ends)
    reads.run(8)
    assert reads.prefill.poll(handle) == DONE


def test_a_killed_source_fails_the_read_and_a_killed_reader_is_read_into_no_more(
    reads: ReadWorld,
) -> None:
    handle = reads.read()
    reads.run(2)
    reads.fabric.kill(D, buffered_descriptors=4)
    reads.run(20)
    assert reads.prefill.poll(handle).reason == "RemoteDisconnect: the peer is gone"
    assert reads.num_read() == 2
    other = ReadWorld()
    other.read()
    other.run(2)
    other.fabric.kill(P, buffered_descriptors=4)
    other.run(20)
    assert other.num_read() == 2
    assert other.fabric.next_at() is None


def test_a_lost_descriptor_fails_the_read() -> None:
    reads = ReadWorld(Faults(loss=1.0))
    assert reads.prefill.poll(reads.read()).state is TransferState.FAILED


def test_an_address_that_is_not_in_the_metadata_cannot_be_read_or_written(reads: ReadWorld) -> None:
    there = reads.remote()
    beyond = RemoteRegion(D, there.boot, there.address + SEAL_BYTES + 8, there.num_bytes, 0)
    for handle in (
        reads.prefill.read(beyond, BLOCKS[:1], BLOCKS[:1]),  # the seal is not where it must be
        reads.prefill.write(beyond, BLOCKS, BLOCKS, b"tag"),
    ):
        assert "not in the peer's metadata" in reads.prefill.poll(handle).reason


def test_a_buffered_write_dies_with_its_target(world: World) -> None:
    world.write()
    world.fabric.kill(P, buffered_descriptors=8)
    world.fabric.kill(D)
    world.run(20)
    assert world.landed() == 0


def test_a_descriptor_for_an_address_that_the_target_lost_fails_the_write(world: World) -> None:
    handle = world.write()
    world.decode._port.registrations.clear()
    world.run(20)
    assert "never registered" in world.prefill.poll(handle).reason


def test_faults_may_change_at_any_time(world: World) -> None:
    handle = world.write()
    world.run(2)
    assert world.fabric.faults.loss == 0.0
    world.fabric.faults = Faults(loss=1.0)
    world.run(2)
    assert world.prefill.poll(handle).reason == "Backend: a descriptor was lost"


def test_who_is_not_known_and_what_is_stale_are_refused(world: World) -> None:
    old = world.remote()
    world.target.fence()
    world.decode.register(world.target)
    world.prefill.add_peer(D, world.decode.metadata())
    world.prefill.write(world.remote(), BLOCKS, BLOCKS, b"new")
    stale = world.prefill.poll(world.prefill.write(old, BLOCKS, BLOCKS, b"stale"))
    assert stale == Poll(TransferState.REFUSED, "stale region generation 0, 1 is known")
    world.prefill.remove_peer(D)
    unknown = world.prefill.poll(world.write())
    assert unknown == Poll(TransferState.REFUSED, "unknown peer 'decode@1'")
    assert world.kinds().count(Kind.REFUSED) == 2
