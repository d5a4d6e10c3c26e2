"""Short runs of the parts that keep a rule of the handoff; each asserts that the rule is kept.

For rules that need more than one handoff shows: the engine's memory and scheduling, several ranks,
the region's own move, the router.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from control_plane.etcd.lease import Lease
from core.clock import ManualClock
from core.errors import RequestError
from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import PrefillCandidate, WriteNotification
from core.request import EngineRequest, TokenUpdate
from core.sampling_params import SamplingParams
from engine.events import Admitted, CacheChanged, Event, Mode, Reserved
from kv_transfer.bytes_region import BytesRegion
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff import decode_side, quarantine
from kv_transfer.handoff.arrivals import awaiting
from kv_transfer.inprocess.model import Faults
from kv_transfer.inprocess.transport import InProcessFabric
from kv_transfer.region import HostRegion
from kv_transfer.transport import PeerName, RemoteRegion, Span, TransferState
from router.dispatch.request_state import Abort, RequestState
from tests.replica import EOS, Replica

E = TypeVar("E", bound=Event)
LONG = list(range(100, 150))  # 3 blocks of 16 and a tail
HERE, PEER = Boot("decode"), Boot("prefill")


def _handoff(name: str, trial: int = 1) -> HandoffId:
    return HandoffId(RequestId(name), Attempt(1, trial))


def _request(name: str, prompt: list[int], max_tokens: int = 4, n: int = 1) -> EngineRequest:
    sampling = SamplingParams(n=n, max_tokens=max_tokens, seed=5, eos_token_ids=(EOS,))
    return EngineRequest(RequestId(name), tuple(prompt), sampling)


def _receive(replica: Replica, request: EngineRequest) -> HandoffId:
    handoff = _handoff(request.request_id)
    replica.engine.add(request, Mode.RECEIVE, handoff=handoff)
    return handoff


def _of_kind(events: list[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


# --- names --------------------------------------------------------------------------------------


def only_writes_of_these_boots_and_this_generation_count() -> None:
    """A notification names the writer's boot, the target's and the region's generation."""
    terms = decode_side.DecodeTerms(
        HERE, 16, (PrefillCandidate(WorkerId("p"), PEER, ""),), True, 300.0, 10.0
    )
    state = decode_side.DecodeSide(terms, _request("d", LONG), _handoff("d"))
    blocks = tuple(map(BlockId, range(4)))
    state, _ = decode_side.advance(state, d.BlocksReserved(_handoff("d"), blocks, 0, 3), 0.0)
    right = WriteNotification(_handoff("d"), PEER, HERE, (0, 0), 3, 0, 4)
    for wrong in (
        replace(right, source=Boot("prefill's life before")),
        replace(right, target=Boot("decode's life before")),
        replace(right, generation=2),
        replace(right, rank_pair=(1, 0)),
    ):
        after, _ = decode_side.advance(state, wrong, 1.0)
        assert not after.is_kv_complete, f"{wrong} counts"
    after, _ = decode_side.advance(state, right, 1.0)
    assert after.is_kv_complete


def a_router_takes_each_index_once_of_its_current_dispatch() -> None:
    """What a thawed twin says changes nothing, and it is told to abort."""
    state = RequestState(_request("r", LONG), deadline=600.0)
    state.begin()
    state.sent(WorkerId("twin"), 0.0, is_suspect=False)
    told = list(state.updated(_tokens(5, 6), 1.0))
    state.suspect(WorkerId("twin"), 2.0, suspect=True)
    effects = [*state.tick(60.0)]
    state.sent(WorkerId("other"), 60.0, is_suspect=False)
    effects += state.updated(_tokens(9, at=2), 61.0)
    assert not any(isinstance(effect, TokenUpdate) for effect in effects), "a twin is heard"
    assert Abort(WorkerId("twin"), 1) in effects, "a twin is not told to abort"
    told += state.updated(_tokens(6, 7, at=1, dispatch=2), 62.0)
    tokens = [t for update in told if isinstance(update, TokenUpdate) for t in update.token_ids]
    assert tokens == [5, 6, 7], "a token was repeated or lost"


class _SlowEtcd:
    """Answers two seconds late."""

    rng = random.Random(1)

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    async def grant_lease(self, ttl_s: float) -> tuple[int, float]:
        self._clock.advance(2.0)
        return 7, ttl_s

    async def keep_alive(self, lease_id: int) -> float:
        await asyncio.Event().wait()
        return 0.0


def a_lease_is_certain_from_when_it_was_sent_for() -> None:
    """Etcd may have counted from then on."""

    async def is_valid_later() -> bool:
        clock = ManualClock()
        client: Any = _SlowEtcd(clock)
        lease = await Lease.grant(client, 3.0, clock=clock)
        assert lease.is_valid(clock.now())
        clock.advance(1.0)
        lease.abandon()
        return lease.is_valid(clock.now())

    assert not asyncio.run(is_valid_later()), "a lease is believed in that may be another's"


def _tokens(*ids: int, at: int = 0, dispatch: int = 1) -> TokenUpdate:
    return TokenUpdate(RequestId("r"), 0, dispatch, at, ids)


# --- decode reserves, prefill pushes ------------------------------------------------------------


def receptions_take_their_share_or_one_request() -> None:
    """At most 30% of the pool waits for peers, or one request."""
    replica = Replica(num_blocks=20)
    for index in range(3):
        start = 200 * index
        _receive(replica, _request(f"d{index}", list(range(start, start + 60))))
    replica.run()
    assert replica.engine.stats().blocks_reserved == 4, "more than 30% is reserved"


def a_full_queue_refuses() -> None:
    """Beyond `max_waiting` a request is refused at once."""
    replica = Replica(max_waiting=2)
    for index in range(2):
        replica.engine.add(_request(f"q{index}", LONG), Mode.LOCAL)
    with pytest.raises(RequestError, match="waiting already"):
        replica.engine.add(_request("q2", LONG), Mode.LOCAL)


def prefill_allocates_whole_prompts_or_nothing() -> None:
    """Two prompts that fit one after the other never hold a part each."""
    replica = Replica(num_blocks=6, chunk_tokens=16)
    for index in range(2):
        prompt = list(range(300 * index, 300 * index + 64))
        replica.engine.add(_request(f"p{index}", prompt), Mode.PREFILL)
    replica.run()
    (admitted,) = _of_kind(replica.events, Admitted)
    assert len(admitted.block_ids) == 4, "a prompt holds a part and waits for more"
    replica.engine.release(RequestId("p0"))
    replica.run()
    assert len(_of_kind(replica.events, Admitted)) == 2
    replica.engine.release(RequestId("p1"))
    replica.run()
    replica.assert_idle()


def what_is_here_needs_no_handoff() -> None:
    """With all reusable blocks here, decode computes the rest."""
    replica = Replica()
    replica.add(LONG, max_tokens=2)
    replica.run()
    _receive(replica, _request("d", LONG))
    assert _of_kind(replica.step(), Admitted), "a handoff for what is here"


def every_rank_pair_is_awaited() -> None:
    """The union over all ranks completes a handoff."""
    arrivals = awaiting(0, 2, ((0, 0), (1, 1))).add((0, 0), 0, 2)
    assert not arrivals.is_complete, "one rank's KV is enough"
    assert arrivals.add((1, 1), 1, 1).add((1, 1), 0, 1).is_complete


def partial_tails_are_zeroed() -> None:
    """Nothing of a block's last owner is left behind its new owner's tokens."""
    replica = Replica(num_blocks=8)
    replica.add(LONG[:20], max_tokens=4)
    replica.step()
    (tail,) = _of_kind(replica.events, Admitted)[0].block_ids[-1:]
    token_bytes = replica.layout.block_bytes // 2 // 16
    rest = replica.bytes_of(tail)[4 * token_bytes : 16 * token_bytes]
    assert rest == bytes(len(rest)), "another's bytes are behind the tail"
    replica.run()
    replica.assert_all_right()


def inbound_blocks_are_invisible_until_complete() -> None:
    """No other request finds a prefix that is not here yet."""
    replica = Replica()
    handoff = _receive(replica, _request("d", LONG))
    replica.step()
    replica.add(LONG, max_tokens=4)
    replica.run()
    assert _of_kind(replica.events, Admitted)[0].cached_tokens == 0, "an inbound block was found"
    replica.assert_all_right()
    replica.engine.end_reservation(handoff, quarantine=False)
    replica.run()
    replica.assert_idle()


def only_computed_blocks_are_matchable() -> None:
    """A prompt that was aborted half-way leaves its computed half in the cache."""
    replica = Replica(chunk_tokens=16)
    first = replica.add(LONG, max_tokens=4)
    replica.step()
    replica.engine.abort(first)
    del replica.requests[first]
    replica.run()
    replica.add(LONG, max_tokens=4)
    replica.run()
    replica.assert_all_right()


def a_prefix_has_one_block() -> None:
    """Of requests that compute the same prompt at once, the first one's blocks are cached."""
    replica = Replica()
    for _ in range(2):
        replica.add(LONG, max_tokens=4)
    replica.run()
    replica.assert_all_right()
    replica.assert_idle()
    assert replica.engine.stats().blocks_cached == 3, "a prefix is cached twice"


def hits_are_held_from_the_reservation_on() -> None:
    """A prefix that a reception counts on is not evicted under it."""
    replica = Replica(num_blocks=8)
    replica.add(LONG[:33], max_tokens=1)
    replica.run()
    request = _request("d", LONG)
    handoff = _receive(replica, request)
    (reserved,) = _of_kind(replica.step(), Reserved)
    assert reserved.num_cached_blocks == 2
    replica.add(list(range(400, 460)), max_tokens=2)  # as many blocks as there are left
    replica.run()
    assert replica.holds_kv(LONG, reserved.block_ids, 32), "a hit was evicted"
    replica.engine.end_reservation(handoff, quarantine=False)
    replica.run()
    replica.assert_idle()


def samples_fork_where_the_handoff_joins() -> None:
    """One handoff owns the blocks; all its samples go on from them."""
    replica = Replica()
    request = _request("d", LONG, n=3)
    replica.requests[request.request_id] = request
    handoff = _receive(replica, request)
    (reserved,) = _of_kind(replica.step(), Reserved)
    replica.write_kv(LONG, reserved.block_ids, 0)
    first = [replica.expected(request.request_id, index)[0] for index in range(3)]
    replica.engine.kv_arrived(handoff, first, num_received=50)
    replica.run()
    for index in range(3):
        told = replica.outputs(request.request_id, index)
        assert told == replica.expected(request.request_id, index)[1:], f"sample {index} is wrong"
    replica.assert_idle()


def receptions_are_not_preempted() -> None:
    """Who lacks blocks takes them from the running, never from a reservation."""
    replica = Replica(num_blocks=8)
    handoff = _receive(replica, _request("d", LONG[:30]))
    replica.step()
    for index in range(2):
        replica.add(list(range(300 * index, 300 * index + 30)), max_tokens=60)
        replica.scheduler._state.history.record(1)  # forecast short, so both are admitted
    replica.run()
    assert replica.engine.stats().preemptions, "nobody lacked blocks"
    assert replica.engine.stats().blocks_reserved == 2, "a reservation was preempted"
    replica.assert_all_right()
    replica.engine.end_reservation(handoff, quarantine=False)
    replica.run()
    replica.assert_idle()


def blocks_wait_for_the_steps_that_may_write_them() -> None:
    """A block of an aborted sequence is not given to a peer under a launched step."""
    replica = Replica(num_blocks=4, max_inflight=4)
    request_id = replica.add(LONG[:40], max_tokens=20)
    replica.step()
    replica.step()
    replica.engine.abort(request_id)
    handoff = _receive(replica, _request("d", LONG))
    assert not _of_kind(replica.step(), Reserved), "reserved under a step that may write"
    replica.run()
    replica.engine.end_reservation(handoff, quarantine=False)
    replica.run()
    replica.assert_idle()


def a_shared_block_is_never_written() -> None:
    """At most (n - 1) // 16 blocks of n tokens are reused: the last token is computed here."""
    replica = Replica()
    prompt = list(range(100, 148))  # exactly three blocks
    for _ in range(2):
        replica.add(prompt, max_tokens=3)
        replica.run()
    cached = [event.cached_tokens for event in _of_kind(replica.events, Admitted)]
    assert cached == [0, 32], "a whole prompt was reused"
    replica.assert_all_right()


def an_abandoned_attempts_blocks_are_nobodys() -> None:
    """A retry gets others; the old ones come back with the quarantine's end alone."""
    replica = Replica(num_blocks=10)
    request = _request("d", LONG)
    handoff = _receive(replica, request)
    (before,) = _of_kind(replica.step(), Reserved)
    replica.engine.retry(handoff, _handoff("d", 2), request)
    (after,) = _of_kind(replica.step(), Reserved)
    assert set(before.block_ids).isdisjoint(after.block_ids), "a block of an abandoned attempt"
    assert replica.engine.end_quarantine(handoff) == 4
    replica.engine.end_reservation(_handoff("d", 2), quarantine=False)
    replica.run()
    replica.assert_idle()


def joined_blocks_are_told_to_the_cache_then() -> None:
    """The ledger hears of a received prefix when it is complete, of full blocks only."""
    replica = Replica()
    handoff = _receive(replica, _request("d", LONG, max_tokens=1))
    (reserved,) = _of_kind(replica.step(), Reserved)
    assert not _of_kind(replica.events, CacheChanged), "told before it was complete"
    replica.write_kv(LONG, reserved.block_ids, 0)
    replica.engine.kv_arrived(handoff, [3], num_received=50)
    (changed,) = _of_kind(replica.step(), CacheChanged)
    assert len(changed.stored) == 3, "other than the full blocks"


# --- the fence ----------------------------------------------------------------------------------


def starving_requests_fence_soon() -> None:
    """Pool pressure ends the patience with a peer."""
    state = quarantine.Quarantine(quarantine_s=5.0)
    enter = quarantine.Enter(_handoff("d"), WorkerId("p"), PEER, 0)
    state, _ = quarantine.advance(state, enter, 0.0)
    _, effects = quarantine.advance(state, quarantine.Tick(starving=True), 0.3)
    assert effects == (quarantine.StartFence(),), "requests starve for the whole period"


def no_sink_goes_during_a_fence() -> None:
    """The current address may be a sink already, and attempts of today know it."""
    state = quarantine.Quarantine(quarantine_s=5.0)
    for now, event in (
        (0.0, quarantine.Enter(_handoff("old"), WorkerId("p"), PEER, 0)),
        (5.0, quarantine.Tick(starving=False)),
        (5.0, quarantine.Fenced(1)),
        (5.1, quarantine.Tick(starving=False)),
        (6.0, quarantine.Enter(_handoff("new"), WorkerId("p"), PEER, 1)),
        (11.0, quarantine.Tick(starving=False)),
    ):
        state, _ = quarantine.advance(state, event, now)
    assert state.is_fencing
    assert state.has_sinks
    state, effects = quarantine.advance(state, quarantine.Settled(_handoff("old")), 11.0)
    assert state.has_sinks, "a sink went that the new attempt's writes may reach"
    assert not effects


def a_fence_takes_the_data_and_leaves_a_sink() -> None:
    """Late bytes at the old address reach no block; what was there is at the new one."""
    region = HostRegion(4096)
    try:
        old = region.view()
        old[:4] = b"data"
        region.fence()
        old[:4] = b"late"
        assert bytes(region.view()[:4]) == b"data", "a late write landed in the pool"
    finally:
        region.close()


def steps_read_the_base_each_time() -> None:
    """After a fence the next step computes at the new address."""
    replica = Replica()
    replica.add(LONG, max_tokens=6)
    replica.step()
    replica.step()
    old = replica.region.view()
    replica.region.fence()
    old[:] = bytes(len(old))
    replica.run()
    replica.assert_all_right()


class _Outbound:
    """A worker that writes to another one, and fences its own region."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fabric = InProcessFabric(
            now=self.clock.now,
            rng=random.Random(1),
            faults=Faults(min_delay_s=1.0, max_delay_s=1.0),
        )
        self.source, self.target = BytesRegion(64), BytesRegion(64)
        self.source.view()[:] = b"\1" * 64
        self.here, self.there = PeerName("here@1"), PeerName("there@1")
        self.writer = self.fabric.transport(self.here)
        self.reader = self.fabric.transport(self.there)
        self.writer.register(self.source)
        self.reader.register(self.target)
        self.writer.add_peer(self.there, self.reader.metadata())

    def write(self, generation: int | None = None) -> TransferState:
        """Write all, fencing on the way once what must end before has ended."""
        region = self.target
        newest = region.generation if generation is None else generation
        remote = RemoteRegion(self.there, Boot("1"), region.address, region.num_bytes, newest)
        spans = [Span(index * 8, 8) for index in range(8)]
        handle = self.writer.write(remote, spans, spans, b"tag")
        finish_outbound(self)
        self.source.fence()
        return self.end_of(handle)

    def end_of(self, handle: int) -> TransferState:
        """Let time pass until a write is over."""
        for _ in range(40):
            self.clock.advance(1.0)
            state = self.writer.poll(handle).state  # pyright: ignore[reportArgumentType] - a NewType
            if state is not TransferState.PENDING:
                return state
        return TransferState.PENDING


def finish_outbound(worker: _Outbound) -> None:
    """Let outbound transfers end before the region moves."""
    for _ in range(20):
        worker.clock.advance(1.0)
        worker.fabric.step()


def a_fence_waits_for_outbound_writes() -> None:
    """A source that is read after the move would send the sink's zeros under a valid notice."""
    worker = _Outbound()
    assert worker.write() is TransferState.DONE
    assert len(worker.reader.notifications()) == 1
    assert bytes(worker.target.view()[:64]) == b"\1" * 64, "zeros under a valid notification"


def stale_generations_are_refused() -> None:
    """A descriptor of an older region is written to no more once a newer one was."""
    worker = _Outbound()
    assert worker.write(generation=2) is TransferState.DONE
    assert worker.write(generation=1) is TransferState.REFUSED, "written by an old descriptor"
