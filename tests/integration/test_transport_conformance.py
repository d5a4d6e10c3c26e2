"""What every transport owes its callers, on real processes over NIXL and inside one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from core.clock import ManualClock
from kv_transfer.bytes_region import BytesRegion
from kv_transfer.inprocess.model import Faults
from kv_transfer.inprocess.transport import InProcessFabric
from kv_transfer.transport import PeerName, Poll, Span, WriteState
from tests.fabric_agents import Agent, RemoteAgent, wait_until

NUM_BYTES = 8 << 20
Make = Callable[[str], Any]


@pytest.fixture(params=["inprocess", "nixl", "nixl_tcp"], scope="module")
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Return a maker of agents by name; processes end with the module."""
    if request.param == "inprocess":
        clock = ManualClock()
        fabric = InProcessFabric(
            now=lambda: (clock.advance(0.001), clock.now())[1],
            rng=random.Random(7),
            faults=Faults(min_delay_s=0.0, max_delay_s=0.0001),
        )
        yield lambda name: Agent(fabric.transport(PeerName(name)), BytesRegion(NUM_BYTES))
        return
    env = {"UCX_TLS": "tcp"} if request.param == "nixl_tcp" else {}
    with ExitStack() as stack:

        def start(name: str) -> RemoteAgent:
            agent = RemoteAgent(name, num_bytes=NUM_BYTES, env=env)
            stack.callback(agent.end)
            return agent

        yield start


@pytest.fixture(scope="module")
def pair(make: Make) -> tuple[Any, Any]:
    """A writer and a target that know each other; tests leave them alive."""
    writer, target = make("writer@1"), make("target@1")
    writer.add_peer(target.introduce())
    target.add_peer(writer.introduce())
    return writer, target


def end_of(agent: Any, handle: int) -> Poll:
    """Poll a write to its end."""
    polls: list[Poll] = []

    def has_ended() -> bool:
        polls.append(agent.poll(handle))
        return polls[-1].state is not WriteState.PENDING

    wait_until(has_ended, "the end of a write")
    return polls[-1]


def write_all(writer: Any, target: Any, tag: bytes, pieces: int = 1) -> Poll:
    """Write the whole region in so many pieces."""
    size = NUM_BYTES // pieces
    spans = [Span(index * size, size) for index in range(pieces)]
    return end_of(writer, writer.write(target.introduce().region, spans, spans, tag))


def test_bytes_land_where_told_and_the_notification_follows(pair: tuple[Any, Any]) -> None:
    writer, target = pair
    writer.put(100, b"first")
    writer.put(5000, b"second")
    target.fill(0)
    local, there = [Span(100, 5), Span(5000, 6)], [Span(70_000, 5), Span(3, 6)]
    tag = bytes(range(256))  # any bytes, zeros too
    handle = writer.write(target.introduce().region, local, there, tag)
    assert end_of(writer, handle).state is WriteState.DONE
    wait_until(lambda: tag in target.received(), "the notification")
    assert target.read(70_000, 5) == b"first"
    assert target.read(3, 6) == b"second"
    assert target.read(9, 64) == bytes(64)


def test_when_the_notification_is_there_so_are_the_bytes(pair: tuple[Any, Any]) -> None:
    writer, target = pair
    for round_number in range(1, 21):
        writer.fill(round_number)
        tag = f"round {round_number}".encode()
        whole = [Span(0, NUM_BYTES)]
        handle = writer.write(target.introduce().region, whole, whole, tag)
        poll = Poll(WriteState.PENDING)
        while tag not in target.received():
            if poll.state is WriteState.PENDING:  # polling is what sends the notification
                poll = writer.poll(handle)
        assert target.digest() == writer.digest()


def test_every_write_is_notified_once(pair: tuple[Any, Any]) -> None:
    writer, target = pair
    before = len(target.received())
    tags = [f"n{index}".encode() for index in range(50)]
    region = target.introduce().region
    handles = [writer.write(region, [Span(0, 64)], [Span(0, 64)], tag) for tag in tags]
    assert {end_of(writer, handle).state for handle in handles} == {WriteState.DONE}
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
    assert end_of(writer, handle).state is WriteState.DONE
    wait_until(lambda: b"many" in target.received(), "the notification")
    assert target.read(0, len(data)) == wanted


def test_a_write_to_an_unknown_peer_is_refused_at_poll(pair: tuple[Any, Any]) -> None:
    writer, target = pair
    writer.remove_peer(PeerName("target@1"))
    poll = write_all(writer, target, b"nobody")
    assert poll.state is WriteState.REFUSED, "nothing was posted"
    assert "target@1" in poll.reason
    writer.add_peer(target.introduce())


def test_remove_and_add_again_works(pair: tuple[Any, Any]) -> None:
    writer, target = pair
    for round_number in range(3):
        writer.remove_peer(PeerName("target@1"))
        writer.add_peer(target.introduce())
        writer.add_peer(target.introduce())  # replaces
        writer.fill(100 + round_number)
        assert write_all(writer, target, b"again").state is WriteState.DONE
        assert target.digest() == writer.digest()


def test_after_a_fence_the_old_address_is_a_sink_and_the_new_one_works(
    pair: tuple[Any, Any],
) -> None:
    writer, target = pair
    old = target.introduce()
    writer.add_peer(old)
    target.fill(1)
    writer.fill(2)
    target.fence()
    whole = [Span(0, NUM_BYTES)]
    late = end_of(writer, writer.write(old.region, whole, whole, b"late"))
    assert late.state is WriteState.DONE, "a write with old metadata is not refused by the fabric"
    assert target.read(0, NUM_BYTES) == bytes([1]) * NUM_BYTES
    new = target.introduce()
    assert new.region.generation == old.region.generation + 1
    writer.add_peer(new)
    assert write_all(writer, target, b"fresh").state is WriteState.DONE
    assert target.digest() == writer.digest()
    stale = end_of(writer, writer.write(old.region, whole, whole, b"stale"))
    assert stale.state is WriteState.REFUSED, "a newer generation is known"


def test_a_peer_that_restarts_is_another_peer(make: Make, pair: tuple[Any, Any]) -> None:
    writer, _ = pair
    first = make("decode-0@boot1")
    writer.add_peer(first.introduce())
    writer.fill(5)
    assert write_all(writer, first, b"to the first").state is WriteState.DONE
    gone = first.introduce().region
    first.kill() if isinstance(first, RemoteAgent) else first.close()
    second = make("decode-0@boot2")
    writer.add_peer(second.introduce())
    assert write_all(writer, second, b"to the second").state is WriteState.DONE
    assert second.digest() == writer.digest()
    whole = [Span(0, NUM_BYTES)]
    assert end_of(writer, writer.write(gone, whole, whole, b"x")).state is WriteState.FAILED
    assert b"x" not in second.received()


def test_a_new_agent_under_a_known_name_replaces_the_old_one(
    make: Make, pair: tuple[Any, Any]
) -> None:
    writer, _ = pair
    first = make("renewed@1")
    writer.add_peer(first.introduce())
    writer.fill(6)
    assert write_all(writer, first, b"to the first").state is WriteState.DONE
    first.kill() if isinstance(first, RemoteAgent) else first.close()
    second = make("renewed@1")
    writer.add_peer(second.introduce())
    assert write_all(writer, second, b"to the second").state is WriteState.DONE
    assert second.digest() == writer.digest()


def test_metadata_of_another_is_refused_and_harms_neither(pair: tuple[Any, Any]) -> None:
    writer, target = pair
    assert "target@1" in writer.refused_peer("target@1", writer.introduce().metadata)
    assert write_all(writer, target, b"still fine").state is WriteState.DONE


def test_health_says_what_carries_the_bytes(
    request: pytest.FixtureRequest, pair: tuple[Any, Any]
) -> None:
    writer, target = pair
    write_all(writer, target, b"first may connect")
    write_all(writer, target, b"second shows")
    wanted = {"inprocess": "inprocess", "nixl": "ucx (cma)", "nixl_tcp": "ucx (tcp)"}
    assert writer.health() == wanted[request.node.callspec.params["make"]]
