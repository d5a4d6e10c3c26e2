"""The in-process fabric is a function of its seed and the calls made."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from core.clock import ManualClock
from core.ids import Boot
from kv_transfer.bytes_region import BytesRegion
from kv_transfer.inprocess.model import FabricEvent, Faults, Frozen, Kind
from kv_transfer.inprocess.transport import InProcessFabric
from kv_transfer.transport import PeerName, RemoteRegion, Span, TransferState

NAMES = [PeerName(f"worker-{index}@1") for index in range(3)]
NUM_BYTES = 48
FAULTS = Faults(
    min_delay_s=0.1, max_delay_s=2.0, loss=0.05, notification_loss=0.05, corruption=0.05
)

Action = tuple[str | int, ...]

actions: st.SearchStrategy[list[Action]] = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["write", "read"]),
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(1, 6),
        ),
        st.tuples(st.just("fence"), st.integers(0, 2)),
        st.tuples(st.sampled_from(["freeze", "stall", "thaw"]), st.integers(0, 2)),
        st.tuples(st.sampled_from(["cut", "heal"]), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("advance"), st.integers(1, 5)),
    ),
    max_size=30,
)


class World:
    """Three agents that know each other."""

    def __init__(self, seed: int) -> None:
        self.clock = ManualClock()
        self.log: list[FabricEvent] = []
        self.fabric = InProcessFabric(
            now=self.clock.now,
            rng=random.Random(seed),
            faults=FAULTS,
            on_event=self.log.append,
        )
        self.regions = [BytesRegion(NUM_BYTES) for _ in NAMES]
        self.agents = [self.fabric.transport(name) for name in NAMES]
        for index, (agent, region) in enumerate(zip(self.agents, self.regions, strict=True)):
            region.view()[:] = bytes([index + 1]) * NUM_BYTES
            agent.register(region)
        for agent in self.agents:
            for other in self.agents:
                agent.add_peer(other.name, other.metadata())

    def do(self, action: Action) -> None:
        match action:
            case ("write", int(source), int(target), int(number)):
                self.agents[source].write(self.remote(target), *spans(number), b"tag")
            case ("read", int(reader), int(source), int(number)):
                self.agents[reader].read(self.remote(source), *spans(number))
            case ("fence", int(peer)):
                self.fence(peer)
            case ("freeze", int(peer)):
                self.fabric.freeze(NAMES[peer], Frozen.PROCESS)
            case ("stall", int(peer)):
                self.fabric.freeze(NAMES[peer], Frozen.ALL)
            case ("thaw", int(peer)):
                self.fabric.thaw(NAMES[peer])
            case ("cut", int(source), int(target)):
                self.fabric.cut(NAMES[source], NAMES[target])
            case ("heal", int(source), int(target)):
                self.fabric.heal(NAMES[source], NAMES[target])
            case ("advance", int(seconds)):
                self.advance(seconds)
            case _:
                raise AssertionError(action)

    def remote(self, peer: int) -> RemoteRegion:
        region = self.regions[peer]
        return RemoteRegion(NAMES[peer], Boot("1"), region.address, NUM_BYTES, region.generation)

    def fence(self, peer: int) -> None:
        """Move a region; the others learn where to."""
        self.regions[peer].fence()
        self.agents[peer].register(self.regions[peer])
        for agent in self.agents:
            agent.add_peer(NAMES[peer], self.agents[peer].metadata())

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.fabric.step()


def spans(number: int) -> tuple[list[Span], list[Span]]:
    made = [Span(index * 8, 8) for index in range(number)]
    return made, made


def played(seed: int, script: list[Action]) -> World:
    world = World(seed)
    for action in script:
        world.do(action)
    return world


@given(st.integers(0, 1000), actions)
def test_same_seed_same_log(seed: int, script: list[Action]) -> None:
    first, second = played(seed, script), played(seed, script)
    assert first.log == second.log
    assert [r.view().tobytes() for r in first.regions] == [
        r.view().tobytes() for r in second.regions
    ]


@given(st.integers(0, 1000), actions)
def test_when_the_faults_stop_every_write_and_read_ends_in_order(
    seed: int, script: list[Action]
) -> None:
    world = played(seed, script)
    for name in NAMES:
        world.fabric.thaw(name)
        for other in NAMES:
            world.fabric.heal(name, other)
    for _ in range(20):
        world.advance(2.0)
    assert world.fabric.next_at() is None
    for handle in {event.handle for event in world.log}:
        kinds = [event.kind for event in world.log if event.handle == handle]
        landings = [kind for kind in kinds if kind in {Kind.LANDED, Kind.CORRUPTED}]
        if kinds[-1] in {Kind.FAILED, Kind.REFUSED}:
            assert kinds == [Kind.POSTED, *landings, kinds[-1]]
            continue
        assert kinds[: len(landings) + 1] == [Kind.POSTED, *landings]
        between = kinds[len(landings) + 1 : -1]  # of a read, nothing is told
        assert between in ([Kind.NOTIFIED], [Kind.NOTIFICATION_LOST], [])
        assert kinds[-1] is Kind.DONE
    posted = sum(event.kind is Kind.POSTED for event in world.log)
    ended = sum(event.kind in {Kind.DONE, Kind.FAILED, Kind.REFUSED} for event in world.log)
    assert posted == ended


happenings = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["fence", "freeze", "stall", "thaw"]), st.integers(0, 1)),
        st.tuples(st.just("advance"), st.integers(1, 5)),
    ),
    max_size=12,
)


@given(st.integers(0, 1000), happenings)
def test_a_read_that_is_done_brought_what_its_source_held(seed: int, script: list[Action]) -> None:
    world = World(seed)
    world.fabric.faults = Faults(min_delay_s=0.1, max_delay_s=2.0)
    handle = world.agents[0].read(world.remote(1), *spans(6))
    for action in script:
        world.do(action)
    for name in NAMES:
        world.fabric.thaw(name)
    for _ in range(20):
        world.advance(2.0)
    state = world.agents[0].poll(handle).state
    if state is TransferState.DONE:
        assert bytes(world.regions[0].view()) == bytes([2]) * NUM_BYTES
    else:
        assert state is TransferState.REFUSED
        assert any(action[0] == "fence" for action in script)


def test_another_seed_is_another_log() -> None:
    script: list[Action] = [("write", 0, 1, 6), ("advance", 60)]
    assert played(0, script).log != played(1, script).log
