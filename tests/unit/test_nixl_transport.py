"""NixlTransport over a scripted agent: how its requests' ends become a write's and a read's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import pytest

from core.errors import FabricError
from core.ids import Boot
from core.memory_region import SEAL_BYTES, seal_of
from kv_transfer.nixl.agent import Descriptor, Request
from kv_transfer.nixl.bindings import Registration
from kv_transfer.nixl.seals import Seals
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.region import HostRegion
from kv_transfer.transport import PeerName, Poll, RemoteRegion, Span, TransferState

NAME, PEER = PeerName("here@1"), PeerName("there@1")
NUM_BYTES = 4096
SPANS = [Span(0, 64)]
REMOTE = RemoteRegion(PEER, Boot("1"), 1 << 40, NUM_BYTES, 0)
DONE, PENDING = Poll(TransferState.DONE), Poll(TransferState.PENDING)


class ScriptedAgent:
    """`NixlAgent` as far as the transport calls it; requests are done when the test says so.

    Attributes:
        errors: raised by the call of that name from now on.
        seal: what a read of the peer's seal brings.
    """

    def __init__(self, name: str, *, listen: str) -> None:
        self.registered: list[tuple[int, int]] = []
        self.known: dict[str, bytes] = {}
        self.errors: dict[str, str] = {}
        self.seal = seal_of(REMOTE.generation)
        self.is_immediate = False
        self.done: set[Request] = set()
        self.num_requests = 0
        self.num_released = 0
        self.is_closed = False
        self.arrived: dict[str, list[bytes]] = {}

    def register(self, address: int, num_bytes: int) -> Registration:
        self.registered.append((address, num_bytes))
        return Registration((address, num_bytes))

    def deregister(self, registration: Registration) -> None:
        self.registered = [known for known in self.registered if known != registration]

    def metadata(self) -> bytes:
        return b"metadata"

    def load_peer(self, metadata: bytes) -> str:
        name = metadata.partition(b" ")[0].decode()
        if self.known.get(name, metadata) != metadata:
            msg = "NIXL NotAllowed: another life"
            raise FabricError(msg)
        self.known[name] = metadata
        return name

    def forget_peer(self, name: str) -> None:
        del self.known[name]
        self._fail("forget_peer")

    def prepare_write(
        self, peer: str, local: Iterable[Descriptor], target: Iterable[Descriptor], tag: bytes
    ) -> Request:
        self._fail("prepare")
        self.num_requests += 1
        return Request(self.num_requests)

    def prepare_read(
        self, peer: str, local: Iterable[Descriptor], source: Iterable[Descriptor]
    ) -> Request:
        request = self.prepare_write(peer, local, source, b"")
        if list(source) == [(REMOTE.address + NUM_BYTES, SEAL_BYTES)]:
            ((place, _),) = local
            ctypes.memmove(place, self.seal, SEAL_BYTES)
        return request

    def post(self, request: Request, tag: bytes) -> bool:
        self._fail("post")
        return self.is_immediate

    def is_done(self, request: Request) -> bool:
        self._fail("is_done")
        return request in self.done

    def release(self, request: Request) -> None:
        self.num_released += 1
        self._fail("release")

    def notifications(self) -> dict[str, list[bytes]]:
        self._fail("notifications")
        return self.arrived

    def close(self) -> None:
        self.is_closed = True

    def _fail(self, call: str) -> None:
        if call in self.errors:
            raise FabricError(self.errors[call])


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> ScriptedAgent:
    made = ScriptedAgent("", listen="")
    monkeypatch.setattr("kv_transfer.nixl.transport.NixlAgent", lambda name, *, listen: made)
    return made


@pytest.fixture
def region() -> Iterator[HostRegion]:
    made = HostRegion(NUM_BYTES)
    yield made
    made.close()


@pytest.fixture
def transport(agent: ScriptedAgent, region: HostRegion) -> NixlTransport:
    """One that knows PEER."""
    made = NixlTransport(NAME)
    made.register(region)
    made.add_peer(PEER, b"there@1 first life")
    return made


def test_the_region_is_registered_with_its_seal_and_again_in_place_of_what_it_was(
    agent: ScriptedAgent, transport: NixlTransport, region: HostRegion
) -> None:
    assert agent.registered == [(region.address, NUM_BYTES + SEAL_BYTES)]
    region.fence()
    transport.register(region)
    assert agent.registered == [(region.address, NUM_BYTES + SEAL_BYTES)]
    assert transport.metadata() == b"metadata"
    assert transport.name == NAME


def test_a_checksum_is_of_the_registered_region(
    agent: ScriptedAgent, transport: NixlTransport, region: HostRegion
) -> None:
    region.view()[8:12] = b"tail"
    assert transport.checksum([Span(8, 4)]) == region.checksum([(8, 4)]) != 0
    with pytest.raises(FabricError, match="before register"):
        NixlTransport(NAME).checksum([])


def test_a_write_is_pending_until_its_request_is_done(
    agent: ScriptedAgent, transport: NixlTransport
) -> None:
    handle = transport.write(REMOTE, SPANS, SPANS, b"tag")
    assert transport.poll(handle) == PENDING
    agent.done = {Request(1)}
    assert transport.poll(handle) == DONE
    assert agent.num_released == 1
    with pytest.raises(KeyError):
        transport.poll(handle)


def test_a_read_is_done_when_the_source_still_has_its_seal(
    agent: ScriptedAgent, transport: NixlTransport
) -> None:
    handle = transport.read(REMOTE, SPANS, SPANS)
    agent.done = {Request(1)}
    assert transport.poll(handle) == PENDING, "the seal is asked for"
    agent.done = {Request(1), Request(2)}
    assert transport.poll(handle) == DONE
    assert (agent.num_requests, agent.num_released) == (2, 2)


def test_a_read_that_is_complete_at_once_is_done_at_once(
    agent: ScriptedAgent, transport: NixlTransport
) -> None:
    agent.is_immediate = True
    assert transport.poll(transport.read(REMOTE, SPANS, SPANS)) == DONE
    assert transport.poll(transport.write(REMOTE, SPANS, SPANS, b"tag")) == DONE


@pytest.mark.parametrize("seal", [bytes(SEAL_BYTES), seal_of(1)])
def test_a_read_without_its_seal_is_refused(
    agent: ScriptedAgent, transport: NixlTransport, seal: bytes
) -> None:
    agent.is_immediate, agent.seal = True, seal
    poll = transport.poll(transport.read(REMOTE, SPANS, SPANS))
    assert poll.state is TransferState.REFUSED
    assert "moved" in poll.reason


def test_a_fence_here_under_a_read_refuses_it(
    agent: ScriptedAgent, transport: NixlTransport, region: HostRegion
) -> None:
    handle = transport.read(REMOTE, SPANS, SPANS)
    region.fence()
    agent.done = {Request(1), Request(2)}
    assert transport.poll(handle) == PENDING
    assert transport.poll(handle).reason == "the region here moved under the read"


def test_seals_that_never_come_keep_their_slots(
    agent: ScriptedAgent, transport: NixlTransport
) -> None:
    seals = Seals(agent)  # type: ignore[arg-type]
    slots: set[int] = set()
    while (slot := seals.take()) is not None:
        slots.add(slot)
    assert len(slots) == 1024
    seals.give_back(3)
    assert seals.take() == 3
    agent.is_immediate = True
    for _ in range(1025):
        assert transport.poll(transport.read(REMOTE, SPANS, SPANS)) == DONE, "slots come back"
    agent.is_immediate = False
    handles = [transport.read(REMOTE, SPANS, SPANS) for _ in range(1025)]
    agent.done = {Request(number) for number in range(agent.num_requests + 1)}
    polls = [transport.poll(handle) for handle in handles]
    assert polls[:1024] == [PENDING] * 1024
    assert polls[1024].state is TransferState.REFUSED


@pytest.mark.parametrize("call", ["prepare", "post", "is_done"])
def test_every_error_of_a_request_is_failed_with_its_reason(
    agent: ScriptedAgent, transport: NixlTransport, call: str
) -> None:
    agent.errors = {call: "NIXL RemoteDisconnect: gone", "release": "NIXL Backend: busy"}
    for handle in (
        transport.write(REMOTE, SPANS, SPANS, b"tag"),
        transport.read(REMOTE, SPANS, SPANS),
    ):
        assert transport.poll(handle) == Poll(TransferState.FAILED, "NIXL RemoteDisconnect: gone")


def test_an_unknown_peer_and_a_stale_generation_are_refused_and_nothing_is_posted(
    agent: ScriptedAgent, transport: NixlTransport
) -> None:
    newer = RemoteRegion(PEER, Boot("1"), 1 << 41, NUM_BYTES, 1)
    agent.is_immediate, agent.seal = True, seal_of(1)
    assert transport.poll(transport.write(newer, SPANS, SPANS, b"tag")) == DONE
    stale = transport.poll(transport.write(REMOTE, SPANS, SPANS, b"tag"))
    assert stale == Poll(TransferState.REFUSED, "stale region generation 0, 1 is known")
    assert transport.poll(transport.read(REMOTE, SPANS, SPANS)) == stale
    transport.remove_peer(PEER)
    transport.remove_peer(PEER)
    unknown = transport.poll(transport.read(newer, SPANS, SPANS))
    assert unknown == Poll(TransferState.REFUSED, "unknown peer 'there@1'")
    assert agent.num_requests == 1


def test_another_life_replaces_a_peer_even_where_it_cannot_be_disconnected_from(
    agent: ScriptedAgent, transport: NixlTransport
) -> None:
    agent.errors = {"forget_peer": "NIXL NotFound: dead"}
    transport.add_peer(PEER, b"there@1 first life")
    transport.add_peer(PEER, b"there@1 second life")
    assert agent.known == {PEER: b"there@1 second life"}
    with pytest.raises(FabricError, match="not that of 'other@1'"):
        transport.add_peer(PeerName("other@1"), b"there@1 second life")
    with pytest.raises(FabricError, match="'there@1' was given for 'life'"):
        transport.add_peer(PeerName("life"), b"there@1 second life")


def test_arguments_that_are_wrong_are_refused_before_anything_is_posted(
    agent: ScriptedAgent, transport: NixlTransport
) -> None:
    with pytest.raises(ValueError, match="tag is empty"):
        transport.write(REMOTE, SPANS, SPANS, b"")
    with pytest.raises(ValueError, match=r"remote Span.* is not inside"):
        transport.read(REMOTE, SPANS, [Span(NUM_BYTES, 64)])
    bare = NixlTransport(NAME)
    with pytest.raises(FabricError, match="before register"):
        bare.write(REMOTE, SPANS, SPANS, b"tag")
    assert agent.num_requests == 0


def test_health_names_the_trouble_while_it_lasts(
    agent: ScriptedAgent, transport: NixlTransport
) -> None:
    agent.errors = {"notifications": "NIXL Backend: broken"}
    assert transport.notifications() == []
    assert (transport.health().ok, transport.health().reason) == (False, "NIXL Backend: broken")
    agent.errors, agent.arrived = {}, {PEER: [b"a", b"b"]}
    assert [arrived.payload for arrived in transport.notifications()] == [b"a", b"b"]
    assert (transport.health().ok, transport.health().transport) == (True, "ucx")
    transport.close()
    assert agent.is_closed
