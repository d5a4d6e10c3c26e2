"""Peers that die and freeze in mid-transfer, on real processes over NIXL, on CMA and on TCP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kv_transfer.transport import Poll, Span, WriteHandle, WriteState
from tests.fabric_agents import RemoteAgent, wait_until

NUM_BYTES = 64 << 20
WHOLE = [Span(0, NUM_BYTES)]
OLD, NEW, REUSED = 0x11, 0x22, 0x33
Start = Callable[[str], RemoteAgent]


@pytest.fixture(params=["cma", "tcp"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    env = {"UCX_TLS": "tcp"} if request.param == "tcp" else {}
    with ExitStack() as stack:

        def make(name: str) -> RemoteAgent:
            agent = RemoteAgent(name, num_bytes=NUM_BYTES, env=env)
            stack.callback(agent.end)
            return agent

        yield make


@pytest.fixture
def pair(start: Start) -> tuple[RemoteAgent, RemoteAgent]:
    """A writer full of NEW that is connected to a target full of OLD."""
    writer, target = start("writer@1"), start("target@1")
    introduction = target.introduce()
    writer.add_peer(introduction)
    writer.fill(NEW)
    target.fill(OLD)
    little = [Span(0, 1)]
    end_of(writer, writer.write(introduction.region, little, little, b"connect"))
    target.put(0, bytes([OLD]))
    return writer, target


def end_of(agent: RemoteAgent, handle: WriteHandle) -> Poll:
    polls: list[Poll] = []

    def has_ended() -> bool:
        polls.append(agent.poll(handle))
        return polls[-1].state is not WriteState.PENDING

    wait_until(has_ended, "the end of a write")
    return polls[-1]


def begin_write(writer: RemoteAgent, target: RemoteAgent, tag: bytes) -> None:
    """Start writing everything, and return while it is under way."""
    region = target.introduce().region
    writer.start("write", region, WHOLE, WHOLE, tag)
    wait_until(lambda: target.read(0, 1) == bytes([NEW]), "the first byte")


def freeze_in_mid_transfer(writer: RemoteAgent, target: RemoteAgent) -> None:
    """Leave the writer stopped with a part of its write landed."""
    for _ in range(20):
        begin_write(writer, target, b"late")
        writer.freeze()
        time.sleep(0.05)  # what the kernel had accepted lands
        if target.read(NUM_BYTES - 1, 1) == bytes([OLD]):
            return
        writer.thaw()  # it was too quick for us
        end_of(writer, writer.finish("write"))
        target.fill(OLD)
    pytest.fail("the writer could not be frozen in mid-transfer")


def test_fence_keeps_late_bytes_of_a_thawed_writer_out(
    pair: tuple[RemoteAgent, RemoteAgent],
) -> None:
    writer, target = pair
    freeze_in_mid_transfer(writer, target)
    target.fence()
    time.sleep(0.02)  # the rule: reuse blocks 20 ms after a fence
    fenced = target.digest()
    assert target.read(0, 1) == bytes([NEW]), "the data moved along"
    assert target.read(NUM_BYTES - 1, 1) == bytes([OLD])
    writer.thaw()
    assert end_of(writer, writer.finish("write")).state is WriteState.DONE, "it never knew"
    wait_until(lambda: b"late" in target.received(), "the notification of the late write")
    assert target.digest() == fenced, "late bytes in the pool"
    writer.add_peer(target.introduce())
    handle = writer.write(target.introduce().region, WHOLE, WHOLE, b"after")
    assert end_of(writer, handle).state is WriteState.DONE
    assert target.digest() == writer.digest()


def test_a_killed_target_fails_the_write(pair: tuple[RemoteAgent, RemoteAgent]) -> None:
    writer, target = pair
    region = target.introduce().region
    target.kill()
    handle = writer.write(region, WHOLE, WHOLE, b"to nobody")
    assert end_of(writer, handle).state is WriteState.FAILED


def test_a_target_killed_in_mid_transfer_ends_the_write(
    pair: tuple[RemoteAgent, RemoteAgent],
) -> None:
    writer, target = pair
    begin_write(writer, target, b"cut off")
    target.kill()
    handle = writer.finish("write")
    assert end_of(writer, handle).state in {WriteState.FAILED, WriteState.DONE}
    assert writer.read(0, 1) == bytes([NEW]), "the writer lives"


def test_a_writer_killed_in_mid_transfer_never_notifies(
    start: Start, pair: tuple[RemoteAgent, RemoteAgent]
) -> None:
    writer, target = pair
    begin_write(writer, target, b"half")
    writer.kill()
    is_complete = target.read(NUM_BYTES - 1, 1) == bytes([NEW])
    time.sleep(0.3)  # no event says that nothing comes
    assert is_complete or b"half" not in target.received()
    heir = start("writer@2")
    heir.add_peer(target.introduce())
    heir.fill(NEW + 1)
    handle = heir.write(target.introduce().region, WHOLE, WHOLE, b"whole")
    assert end_of(heir, handle).state is WriteState.DONE
    wait_until(lambda: b"whole" in target.received(), "the notification")
    assert target.digest() == heir.digest()


def test_a_frozen_target_leaves_the_write_pending_and_the_writer_free(
    start: Start, pair: tuple[RemoteAgent, RemoteAgent]
) -> None:
    writer, target = pair
    stranger = start("stranger@1")  # not connected yet: needs the target's answer on any transport
    introduction = target.introduce()
    stranger.add_peer(introduction)
    stranger.fill(NEW)
    target.freeze()
    handle = stranger.write(introduction.region, WHOLE, WHOLE, b"patience")
    time.sleep(0.5)
    assert stranger.poll(handle).state is WriteState.PENDING
    stranger.add_peer(writer.introduce())
    other = stranger.write(writer.introduce().region, WHOLE, WHOLE, b"other")
    assert end_of(stranger, other).state is WriteState.DONE, "others are not held up"
    target.thaw()
    assert end_of(stranger, handle).state is WriteState.DONE
    wait_until(lambda: b"patience" in target.received(), "the notification")


def test_newer_metadata_of_a_peer_leaves_the_writes_to_it_alone(
    pair: tuple[RemoteAgent, RemoteAgent],
) -> None:
    writer, target = pair
    region = target.introduce().region
    handles = [writer.write(region, WHOLE, WHOLE, b"under way") for _ in range(2)]
    target.fence()
    writer.add_peer(target.introduce())  # as when the next ask brings it
    assert {end_of(writer, handle).state for handle in handles} == {WriteState.DONE}, (
        "FAILED would never settle, and hold the source blocks until the agent is destroyed"
    )
    handle = writer.write(target.introduce().region, WHOLE, WHOLE, b"fresh")
    assert end_of(writer, handle).state is WriteState.DONE
    wait_until(lambda: b"fresh" in target.received(), "the notification")
    assert target.digest() == writer.digest()


def test_a_peer_can_be_removed_while_a_write_to_it_is_under_way(
    pair: tuple[RemoteAgent, RemoteAgent],
) -> None:
    writer, target = pair
    handle = writer.write(target.introduce().region, WHOLE, WHOLE, b"cut off")
    writer.remove_peer("target@1")
    assert end_of(writer, handle).state in {WriteState.DONE, WriteState.FAILED}
    writer.add_peer(target.introduce())
    again = writer.write(target.introduce().region, WHOLE, WHOLE, b"again")
    assert end_of(writer, again).state is WriteState.DONE


def test_a_destroyed_agent_reads_our_memory_no_more(
    start: Start, pair: tuple[RemoteAgent, RemoteAgent]
) -> None:
    _, target = pair
    stranger = start("stranger@1")
    introduction = target.introduce()
    stranger.add_peer(introduction)
    target.freeze()
    stranger.write(introduction.region, WHOLE, WHOLE, b"never")
    stranger.close()  # asserts, by its deadline, that it does not hang
    stranger.fill(REUSED)
    target.thaw()
    time.sleep(0.3)  # no event says that nothing comes
    assert not target.contains(REUSED)
    assert b"never" not in target.received()
