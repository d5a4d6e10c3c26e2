"""Parts of both pools, each alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from control_plane.rpc.load_reports import LoadReports
from core.errors import PeerUnavailable
from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.lifetime import PrefillDecision
from core.messages import (
    BlockRun,
    PrefillAsk,
    PrefillCandidate,
    RegionDescriptor,
    RequestFailed,
    RequestRefused,
    SettleHandoff,
    StartRequest,
    TokenBatch,
    WorkerLoad,
)
from core.request import EngineRequest, TokenUpdate
from core.sampling_params import SamplingParams
from core.worker_record import Hello
from decode_pool.live_request import RequestState
from decode_pool.metrics import DecodeCollector
from decode_pool.prefill_peers import PrefillPeers
from decode_pool.stats import EXPOSED_BUCKETS_S, DecodeStats, Histogram
from decode_pool.token_outbox import TokenOutbox
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff import prefill_messages as p
from prefill_pool.metrics import PrefillCollector
from prefill_pool.router_streams import RouterStreams
from prefill_pool.stats import PrefillStats

REQUEST = EngineRequest(RequestId("r"), (1, 2), SamplingParams())
P0 = PrefillCandidate(WorkerId("p0"), Boot("b0"), "")


class FakeStream:
    """Keeps what was sent."""

    def __init__(self, boot: str = "b0") -> None:
        self.peer = Hello("worker", "p0", Boot(boot))
        self.is_suspect = False
        self.sent: list[Any] = []
        self.closed = ""

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self, reason: str = "") -> None:
        self.closed = reason


def ask_of(trial: int) -> PrefillAsk:
    region = RegionDescriptor(WorkerId("d"), Boot("d"), 0, 0, 8, 1, "", b"")
    handoff = HandoffId(RequestId("r"), Attempt(1, trial))
    return PrefillAsk(handoff, REQUEST, 0, (BlockRun(BlockId(0), 1),), region, 1.0)


class Peers:
    """`PrefillPeers` whose connection opens when the test says so."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.refusing = ""
        self.unreachable: list[tuple[Boot, str]] = []
        self.num_connects = 0
        listener: Any = None
        self.peers = PrefillPeers(
            self.connect, listener, group, lambda boot, why: self.unreachable.append((boot, why))
        )

    async def connect(self, candidate: PrefillCandidate, listener: Any) -> Any:
        self.num_connects += 1
        if self.refusing:
            raise PeerUnavailable(self.refusing)


@pytest.mark.anyio
async def test_asks_wait_for_the_one_connection_and_can_be_taken_back() -> None:
    async with asyncio.TaskGroup() as group:
        harness = Peers(group)
        peers = harness.peers
        first, second = ask_of(1), ask_of(2)
        assert peers.ask(P0, first) is None
        assert peers.ask(P0, second) is None
        assert peers.settle(P0.boot, first.handoff), "it never left"
        stream = FakeStream()
        peers.opened(stream)
        assert stream.sent == [second]
        assert not peers.settle(P0.boot, second.handoff)
        assert stream.sent[-1] == SettleHandoff(second.handoff)
        assert not peers.settle(Boot("nobody"), second.handoff)
    assert harness.num_connects == 1


@pytest.mark.anyio
async def test_a_suspect_peer_is_asked_nothing_until_it_is_back() -> None:
    async with asyncio.TaskGroup() as group:
        peers = Peers(group).peers
        stream, other = FakeStream(), FakeStream()
        peers.opened(stream)
        peers.suspected(other, suspect=True)
        assert peers.ask(P0, ask_of(1)) is None, "another stream's silence is not this one's"
        peers.suspected(stream, suspect=True)
        assert peers.ask(P0, ask_of(2)) == "p0 does not answer"
        peers.suspected(stream, suspect=False)
        assert peers.ask(P0, ask_of(3)) is None
        assert not peers.closed(other)
        assert peers.closed(stream)
        peers.suspected(stream, suspect=True)


@pytest.mark.anyio
async def test_a_refused_connection_names_the_asks_that_never_left() -> None:
    async with asyncio.TaskGroup() as group:
        harness = Peers(group)
        harness.refusing = "refused"
        harness.peers.ask(P0, ask_of(1))
    assert harness.unreachable == [(P0.boot, "p0: refused")]
    assert harness.peers.unreachable(P0.boot) == [ask_of(1).handoff]
    assert harness.peers.unreachable(P0.boot) == []


@pytest.mark.anyio
async def test_a_boot_is_replaced_when_its_stream_is_gone_and_another_boot_was_reached() -> None:
    async with asyncio.TaskGroup() as group:
        peers = Peers(group).peers
        old = FakeStream("b0")
        peers.opened(old)
        assert not peers.is_replaced(P0.worker_id, P0.boot)
        peers.opened(FakeStream("b1"))
        assert not peers.is_replaced(P0.worker_id, P0.boot), "frozen, perhaps: it has its stream"
        peers.closed(old)
        assert peers.is_replaced(P0.worker_id, P0.boot)
        assert not peers.is_replaced(WorkerId("p1"), P0.boot)
        peers.close()


@pytest.mark.anyio
async def test_closing_closes_open_streams_only() -> None:
    async with asyncio.TaskGroup() as group:
        peers = Peers(group).peers
        stream = FakeStream()
        peers.opened(stream)
        peers.ask(PrefillCandidate(WorkerId("p1"), Boot("b1"), ""), ask_of(1))
        peers.close()
        assert stream.closed


def test_tokens_of_a_step_leave_in_one_message_and_before_what_follows() -> None:
    outbox, one, two = TokenOutbox(), FakeStream(), FakeStream()
    updates = [TokenUpdate(RequestId(f"r{i}"), 0, 1, 0, (i,)) for i in range(3)]
    outbox.add(one, updates[0])
    outbox.add(two, updates[1])
    outbox.add(one, updates[2])
    failed = RequestFailed(RequestId("r2"), 1, "", retriable=True)
    outbox.send(one, failed)
    outbox.flush()
    outbox.flush()
    assert one.sent == [TokenBatch((updates[0], updates[2])), failed]
    assert two.sent == [TokenBatch((updates[1],))]


def test_a_router_that_sends_a_request_to_a_prefill_worker_is_told() -> None:
    load, stream = LoadReports(), FakeStream()
    routers = RouterStreams(load)
    routers.on_open(stream)
    routers.on_suspect(stream, suspect=True)
    routers.on_message(stream, StartRequest(REQUEST, 3, (), 1.0))
    (refused,) = stream.sent
    assert isinstance(refused, RequestRefused)
    assert (refused.dispatch, refused.reason) == (3, "wrong_role")
    load.tell(WorkerLoad())
    routers.on_closed(stream, "gone")
    load.tell(WorkerLoad())
    assert stream.sent[1:] == [WorkerLoad()]


def test_a_router_that_comes_late_learns_what_a_quiet_prefill_worker_told_last() -> None:
    load, stream = LoadReports(), FakeStream()
    load.tell(WorkerLoad(num_waiting=2))
    RouterStreams(load).on_open(stream)
    assert stream.sent == [WorkerLoad(num_waiting=2)]


def scrape(collector: Any) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_decode_series() -> None:
    assert scrape(DecodeCollector(lambda: None)) == {}
    histogram = Histogram(EXPOSED_BUCKETS_S)
    for value in (0.0004, 0.003, 9.0):
        histogram.observe(value)
    stats = DecodeStats(
        requests_by_state={**dict.fromkeys(RequestState, 0), RequestState.RUNNING: 3},
        handoffs_by_outcome={d.AttemptOutcome.COMPLETED: 5},
        decisions={PrefillDecision.LOCAL_HIT: 2},
        exposed_transfer=histogram.snapshot(),
        quarantined_attempts=1,
        quarantine_s=2.5,
        fences=4,
    )
    series = scrape(DecodeCollector(lambda: stats))
    assert series['dovetail:worker_requests{state="running"}'] == 3
    assert series['dovetail:worker_requests{state="waiting"}'] == 0
    assert series['dovetail:handoffs_total{outcome="completed"}'] == 5
    assert series['dovetail:prompts_total{decision="local_hit"}'] == 2
    assert series['dovetail:exposed_transfer_seconds_bucket{le="0.005"}'] == 2
    assert series["dovetail:exposed_transfer_seconds_count"] == 3
    assert series["dovetail:exposed_transfer_seconds_sum"] == pytest.approx(9.0034)
    assert series["dovetail:quarantined_attempts"] == 1
    assert series["dovetail:quarantine_seconds_total"] == 2.5
    assert series["dovetail:fences_total"] == 4


def test_prefill_series() -> None:
    assert scrape(PrefillCollector(lambda: None)) == {}
    stats = PrefillStats(
        attempts_by_stage={"computing": 2},
        attempts_by_outcome={p.AttemptOutcome.SETTLED: 3},
        writes_pending=4,
        tombstones=5,
        blocks_pushed=6,
        bytes_pushed=7,
        writes_failed=8,
        agent_renewals=9,
    )
    series = scrape(PrefillCollector(lambda: stats))
    assert series['dovetail:prefill_attempts{stage="computing"}'] == 2
    assert series['dovetail:prefill_handoffs_total{outcome="settled"}'] == 3
    assert series["dovetail:writes_pending"] == 4
    assert series["dovetail:blocks_pushed_total"] == 6
    assert series["dovetail:bytes_pushed_total"] == 7
    assert series["dovetail:writes_failed_total"] == 8
    assert series["dovetail:agent_renewals_total"] == 9
