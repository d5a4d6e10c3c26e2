"""Handoffs at the decode worker: feeds their state machines and does what these say.

    engine --reserved--> |             | --Ask, Settle--> prefill peers
    prefill --tokens---> | decode_side | --Retry, Join, EndReservation--> engine
    fabric --landed----> |   (pure)    | --EmitTokens, Fail--> the request's owner
    time, fence -------> |             | --Settle--> quarantine --StartFence, Free--> region, engine

The engine hears of an abandoned attempt (which quarantines its blocks) before it hears that the
quarantine is over: both go to its thread in the order of the effects.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, assert_never

from msgspec.structs import replace

from control_plane.rpc.interface import Stream
from core.clock import Clock
from core.ids import Boot, HandoffId, RequestId
from core.lifetime import Duration, PrefillDecision, Stamp
from core.messages import (
    FirstTokens,
    HandoffFailed,
    HandoffProgress,
    HandoffRefused,
    HandoffScored,
    HandoffSettled,
    PrefillAsk,
    PrefillToDecode,
    RegionDescriptor,
    WriteNotification,
)
from core.request import PromptLogprobs
from decode_pool.live_request import LiveRequest, RequestState
from decode_pool.prefill_peers import PrefillPeers
from decode_pool.prefill_slips import slip_of
from decode_pool.stats import EXPOSED_BUCKETS_S, Histogram
from decode_pool.verification import Verification
from engine.engine_driver import EngineDriver
from engine.events import Reserved
from engine.interface import EngineApi
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff import decode_side, quarantine
from kv_transfer.paths import Paths
from kv_transfer.transfer_driver import TransferDriver

_log = logging.getLogger(__name__)

_NOTHING_LOST = (
    d.AttemptOutcome.COMPLETED,
    d.AttemptOutcome.REFUSED,
    d.AttemptOutcome.UNDELIVERED,
)
"""Outcomes of attempts whose hits are known, or that never began."""

OnAnswer = Callable[[LiveRequest, asyncio.Future[None]], None]


class Owner(Protocol):
    """Whoever owns the requests; `decode_pool.requests.Requests`."""

    def find(self, handoff: HandoffId) -> LiveRequest | None:
        """Return the request that an attempt belongs to, None when it is over."""
        ...

    def handing_off(self) -> Iterable[LiveRequest]:
        """Return the requests whose handoff is not over; the caller may end some meanwhile."""
        ...

    def emit_first(self, live: LiveRequest, effect: d.EmitTokens) -> None:
        """Send the first tokens on."""
        ...

    def emit_scores(self, live: LiveRequest, logprobs: PromptLogprobs) -> None:
        """Send on what is new of the prompt's log-probabilities."""
        ...

    def fail(self, live: LiveRequest, message: str, *, retriable: bool) -> None:
        """Tell the router that the request cannot go on here."""
        ...

    def end_if_over(self, live: LiveRequest) -> None:
        """Forget the request when nothing is left to do for it."""
        ...


class Receiving:
    """Lives in the worker's task; every method runs there.

    Args:
        on_joined: called on the loop with the engine's answer to a join; has `joined` called.
        start_fence: moves the region, registers it again, and has `region_ready` called.
        release_sinks: unmaps what fences left behind.
        verification: has `summed` called; None where what lands is trusted.
        vocab_size: of the model; None where first tokens are not held against it.

    Attributes:
        paths: what is known of the fabric from what comes.
    """

    def __init__(  # noqa: PLR0913 - keyword-only wiring, called once
        self,
        owner: Owner,
        *,
        engine: EngineDriver,
        fabric: TransferDriver,
        peers: PrefillPeers,
        region: RegionDescriptor,
        on_joined: OnAnswer,
        start_fence: Callable[[], object],
        release_sinks: Callable[[], None],
        verification: Verification | None,
        vocab_size: int | None,
        quarantine_s: float,
        clock: Clock,
    ) -> None:
        self._owner = owner
        self._engine = engine
        self._fabric = fabric
        self._peers = peers
        self._region = region
        self._on_joined = on_joined
        self._start_fence = start_fence
        self._release_sinks = release_sinks
        self._verification = verification
        self._vocab_size = vocab_size
        self._clock = clock
        self._quarantine = quarantine.Quarantine(quarantine_s, generation=region.generation)
        self._deferred: list[Reserved] = []
        self._is_watching = False
        self.is_starving = False
        self.outcomes = Counter(dict.fromkeys(d.AttemptOutcome, 0))
        self.exposed = Histogram(EXPOSED_BUCKETS_S)
        self.quarantine_s = 0.0
        self.num_fences = 0
        self.num_corrupt = 0
        self.paths = Paths()

    @property
    def num_quarantined(self) -> int:
        """Attempts whose blocks a late write may reach."""
        return len(self._quarantine.entries)

    @property
    def is_settling(self) -> bool:
        """Whether ended attempts wait for their peers or for time."""
        return self._is_watching

    # --- events -----------------------------------------------------------------------------

    def reserved(self, event: Reserved) -> None:
        """The engine reserved blocks. During a fence the ask waits for the new region."""
        if self._quarantine.is_fencing:
            self._deferred.append(event)
            return
        live = self._current(event.handoff)
        if live is None:
            return
        live.state = RequestState.RECEIVING
        live.path.blocks_reused_decode = event.num_cached_blocks
        live.lifetime.stamp(Stamp.RESERVED, self._clock.now())
        generation = self._region.generation
        self.advance(
            live,
            d.BlocksReserved(event.handoff, event.block_ids, event.num_cached_blocks, generation),
        )

    def prefill_says(self, peer: Boot, message: PrefillToDecode) -> None:
        """A prefill worker's message on any of its streams; of another's attempts it knows
        nothing."""
        match message:
            case HandoffSettled(handoff):
                if handoff in self._quarantine.handoffs_of(peer):
                    self._settled(handoff)
            case HandoffProgress(handoffs):
                for handoff in handoffs:
                    self._peer_says(peer, d.AttemptAlive(handoff))
            case _:
                self._peer_says(peer, message)

    def _peer_says(
        self,
        peer: Boot,
        message: d.AttemptAlive | HandoffScored | FirstTokens | HandoffRefused | HandoffFailed,
    ) -> None:
        """Of the current attempt; another's may come too late, scores behind the first tokens."""
        handoff = message.handoff
        live = self._current(handoff)
        if live is None or live.asked is None:
            return
        if (live.asked.handoff, live.asked_of) != (handoff, peer):
            return
        slip = slip_of(
            live.asked.request,
            message,
            next_scored=live.next_scored,
            vocab_size=self._vocab_size,
        )
        if slip:
            extra = {"request_id": live.request_id}
            _log.error("%s: its prefill worker says what cannot be: %s", handoff, slip, extra=extra)
            self.advance(live, HandoffFailed(handoff, slip))
            return
        if isinstance(message, HandoffScored):
            self._owner.emit_scores(live, message.logprobs)
            self.advance(live, d.AttemptAlive(handoff))
            return
        if isinstance(message, HandoffFailed) and message.is_fabric:
            self._failed(message)
        self.advance(live, message)

    def landed(self, write: WriteNotification) -> None:
        """A write's notification; where that is wanted, its bytes are checked before it counts."""
        live = self._current(write.handoff)
        if live is None:
            return
        if self._verification is not None and live.asked is not None:
            self._verification.begin(live.asked, write)
        else:
            self._arrived(live, write)

    def summed(self, write: WriteNotification, future: asyncio.Future[int]) -> None:
        """The checksum of what a write brought; of no meaning once its attempt is over."""
        live = self._current(write.handoff)
        if live is None:
            return
        if future.result() == write.checksum:
            self._arrived(live, write)
            return
        self.num_corrupt += 1
        end = write.first_block + write.num_blocks - 1
        extra = {"request_id": live.request_id}
        text = "%s: prompt blocks %d to %d are not as they left"
        _log.error(text, write.handoff, write.first_block, end, extra=extra)
        failed = HandoffFailed(write.handoff, "a write was corrupted on its way", is_fabric=True)
        self._failed(failed)
        self.advance(live, failed)

    def _arrived(self, live: LiveRequest, write: WriteNotification) -> None:
        self.paths.worked(write.source)
        self.advance(live, write)

    def _failed(self, message: HandoffFailed) -> None:
        live = self._current(message.handoff)
        if live is not None and live.asked_of is not None:
            self.paths.failed(live.asked_of, message.message, self._clock.now())

    def _current(self, handoff: HandoffId) -> LiveRequest | None:
        """Return the request whose current attempt this is."""
        live = self._owner.find(handoff)
        is_current = live is not None and live.side is not None and live.side.handoff == handoff
        return live if is_current else None

    def peer_opened(self, stream: Stream[Any]) -> None:
        """A prefill worker is reachable: send what waited, and ask again for what is unsettled."""
        boot = stream.peer.boot
        self._peers.opened(stream)
        self._quarantine_event(quarantine.PeerHeard(boot))
        for handoff in self._quarantine.handoffs_of(boot):
            self._peers.settle(boot, handoff)
        self._bury_the_replaced()

    def peer_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        """A prefill worker's heartbeats stopped, or came back."""
        self._peers.suspected(stream, suspect=suspect)
        if suspect:
            self._tell_all(d.PeerLost(stream.peer.boot, "heartbeats stopped"))
        else:
            self._quarantine_event(quarantine.PeerHeard(stream.peer.boot))

    def peer_closed(self, stream: Stream[Any], reason: str) -> None:
        """A stream to a prefill worker is gone."""
        self.paths.forget(stream.peer.boot)
        if self._peers.closed(stream):
            self._tell_all(d.PeerLost(stream.peer.boot, f"stream lost: {reason}"))
            self._bury_the_replaced()

    def peer_unreachable(self, boot: Boot, reason: str) -> None:
        """No stream could be opened: what waited for it was never sent."""
        for handoff in self._peers.unreachable(boot):
            self._peer_event(d.AskUndelivered(handoff, reason))

    def region_ready(self, region: RegionDescriptor) -> None:
        """The fence is done: late writes land in a sink. Asks go on with the new descriptor."""
        self._region = region
        self._quarantine_event(quarantine.Fenced(region.generation))
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            self.reserved(event)

    def region_described(self, region: RegionDescriptor) -> None:
        """The fabric's agent is another one. A fence under way will describe the region, too."""
        if region.generation == self._region.generation:
            self._region = region

    def joined(self, live: LiveRequest, future: asyncio.Future[None]) -> None:
        """The engine runs a request whose KV came; an exception of it is this task's."""
        future.result()
        live.lifetime.stamp(Stamp.JOINED, self._clock.now())

    def tick(self) -> None:
        """Let deadlines pass."""
        self._tell_all(d.Tick())
        self._quarantine_event(quarantine.Tick(starving=self.is_starving))
        self._bury_the_replaced()

    def _peer_event(self, event: d.PeerEvent) -> None:
        live = self._owner.find(event.handoff)
        if live is not None:
            self.advance(live, event)

    def _tell_all(self, event: d.Event) -> None:
        for live in self._owner.handing_off():
            self.advance(live, event)

    # --- one request's handoff --------------------------------------------------------------

    def advance(self, live: LiveRequest, event: d.Event) -> None:
        """Feed a request's handoff and do what it says."""
        if live.side is None:
            return
        now = self._clock.now()
        live.side, effects = decode_side.advance(live.side, event, now)
        if live.side.is_kv_complete:
            live.lifetime.stamp(Stamp.KV_COMPLETE, now)
        for effect in effects:
            self._do(live, effect)
        self._owner.end_if_over(live)

    def _do(self, live: LiveRequest, effect: d.Effect) -> None:
        match effect:
            case d.Ask():
                self._ask(live, effect)
            case d.Settle():
                self._settle(effect)
            case d.EmitTokens():
                live.path.first_tokens = effect.tokens
                live.lifetime.stamp(Stamp.FIRST_TOKEN_RECEIVED, self._clock.now())
                self._owner.emit_first(live, effect)
            case d.AttemptEnded():
                self._count(live, effect)
            case d.Fail():
                self._owner.fail(live, effect.message, retriable=effect.retriable)
            case _:
                self._tell_engine(live, effect)

    def _tell_engine(
        self, live: LiveRequest, effect: d.Join | d.Retry | d.ComputeLocally | d.EndReservation
    ) -> None:
        match effect:
            case d.Join():
                self._join(live, effect)
            case d.Retry():
                live.state = RequestState.WAITING
                live.path.trial = effect.successor.attempt.trial
                self._engine.post(partial(_retry, effect=effect, engine_id=live.engine_id))
            case d.ComputeLocally():
                live.state = RequestState.WAITING
                live.path.computed_here(PrefillDecision.FALLBACK)
                self._engine.post(partial(_compute, effect=effect, engine_id=live.engine_id))
            case d.EndReservation():
                self._engine.post(
                    lambda engine: engine.end_reservation(
                        effect.handoff,
                        quarantine=not effect.untouched,
                        answered=effect.answered,
                    )
                )
            case _:
                assert_never(effect)

    def _ask(self, live: LiveRequest, effect: d.Ask) -> None:
        self._fabric.watch()
        path = live.path
        path.prefill_worker = effect.candidate.worker_id
        path.blocks_asked = sum(run.count for run in effect.blocks)
        live.lifetime.stamp(Stamp.ASKED, self._clock.now())
        ask = PrefillAsk(
            handoff=effect.handoff,
            request=effect.request,
            first_block=effect.first_block,
            blocks=effect.blocks,
            region=self._region,
            remaining_s=effect.remaining_s,
            verify=self._verification is not None,
        )
        live.asked, live.asked_of = ask, effect.candidate.boot
        unreachable = self._peers.ask(effect.candidate, ask)
        if unreachable is not None:
            self.advance(live, d.AskUndelivered(effect.handoff, unreachable))

    def _join(self, live: LiveRequest, effect: d.Join) -> None:
        live.state = RequestState.SETTLING if live.is_finished else RequestState.RUNNING
        exposed = live.lifetime.seconds(Duration.EXPOSED_TRANSFER)
        if exposed is not None:
            self.exposed.observe(exposed)
        tokens = live.path.first_tokens
        joined = self._engine.call(
            lambda engine: engine.kv_arrived(
                effect.handoff,
                effect.first_tokens,
                num_received=effect.num_received,
                num_peer_cached=0 if tokens is None else tokens.cached_tokens,
            )
        )
        joined.add_done_callback(partial(self._on_joined, live))

    def _settle(self, effect: d.Settle) -> None:
        boot = effect.candidate.boot
        entered = quarantine.Enter(
            effect.handoff, effect.candidate.worker_id, boot, effect.generation
        )
        self._quarantine_event(entered)
        if self._peers.settle(boot, effect.handoff):
            self._settled(effect.handoff)  # the ask never left: nobody knows of these blocks

    def _count(self, live: LiveRequest, effect: d.AttemptEnded) -> None:
        self._fabric.unwatch()
        self.outcomes[effect.outcome] += 1
        if effect.outcome not in _NOTHING_LOST:
            live.path.attempt_lost()
        self._suspect_the_fabric(live, effect)
        if effect.outcome is not d.AttemptOutcome.COMPLETED:
            extra = {"request_id": live.request_id}
            _log.info("%s %s: %s", effect.handoff, effect.outcome, effect.reason, extra=extra)

    def _suspect_the_fabric(self, live: LiveRequest, effect: d.AttemptEnded) -> None:
        """A prompt was computed, its tokens are here, and its KV does not come."""
        now = self._clock.now()
        is_late = effect.outcome is d.AttemptOutcome.TIMED_OUT and now < live.deadline
        if is_late and live.path.first_tokens is not None and live.asked_of is not None:
            self.paths.failed(live.asked_of, f"KV does not come: {effect.reason}", now)

    # --- quarantine -------------------------------------------------------------------------

    def _settled(self, handoff: HandoffId) -> None:
        self._quarantine_event(quarantine.Settled(handoff))

    def _bury_the_replaced(self) -> None:
        """A boot is gone when its stream closed and another boot of the worker was reached. A lost
        stream alone proves nothing, and a frozen process keeps its stream."""
        for worker_id, boot in self._quarantine.sink_holders:
            if self._peers.is_replaced(worker_id, boot):
                self._quarantine_event(quarantine.PeerGone(boot))

    def _watch_while_settling(self) -> None:
        """Poll the fabric for ended attempts too: a write ends at its writer, who must settle it,
        only when its target polls."""
        must_poll = self._quarantine.must_poll(self._clock.now())
        if must_poll and not self._is_watching:
            self._fabric.watch()
        elif self._is_watching and not must_poll:
            self._fabric.unwatch()
        self._is_watching = must_poll

    def _quarantine_event(self, event: quarantine.Event) -> None:
        self._quarantine, effects = quarantine.advance(self._quarantine, event, self._clock.now())
        for effect in effects:
            match effect:
                case quarantine.StartFence():
                    self.num_fences += 1
                    self._tell_all(d.RegionRevoked(self._region.generation))
                    self._start_fence()
                case quarantine.Free():
                    self.quarantine_s += effect.seconds
                    self._engine.post(partial(_end_quarantine, handoff=effect.handoff))
                case quarantine.ReleaseSinks():
                    self._release_sinks()
                case _:
                    assert_never(effect)
        self._watch_while_settling()


def _retry(engine: EngineApi, *, effect: d.Retry, engine_id: RequestId) -> None:
    request = replace(effect.request, request_id=engine_id)
    engine.retry(effect.handoff, effect.successor, request)
    if effect.untouched:
        engine.end_quarantine(effect.handoff)


def _compute(engine: EngineApi, *, effect: d.ComputeLocally, engine_id: RequestId) -> None:
    request = replace(effect.request, request_id=engine_id)
    engine.compute_locally(effect.handoff, request)
    if effect.untouched:
        engine.end_quarantine(effect.handoff)


def _end_quarantine(engine: EngineApi, *, handoff: HandoffId) -> None:
    engine.end_quarantine(handoff)
