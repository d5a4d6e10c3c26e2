"""All requests that this worker owns: starts, aborts, tokens in order, deadlines.

    StartRequest -> refused
                 -> WAITING -> RUNNING ------------------------------> last token -> forgotten
                       '-> RECEIVING -> (first tokens sent) -> RUNNING      |
                                               '-> ended by them: SETTLING -'

A token is sent when it comes, once: the next index per sample says what was sent. Of a request
that the router dispatched anew, only the newer dispatch lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

from msgspec.structs import replace

from control_plane.rpc.interface import Stream
from core.clock import Clock
from core.config import KvTransferConfig
from core.errors import RequestError
from core.ids import Attempt, HandoffId, RequestId
from core.lifetime import PrefillDecision, Stamp
from core.messages import (
    AbortRequest,
    MoveRequest,
    PathReport,
    PromptScored,
    RequestFailed,
    RequestMoved,
    RequestRefused,
    StartRequest,
    WorkerLoad,
)
from core.request import PromptLogprobs, TokenUpdate
from core.request_slips import slip_of
from core.worker_record import Role, WorkerRecord
from decode_pool.live_request import LiveRequest, RequestState, TracePath, engine_id_of
from decode_pool.ports import DecodePorts
from decode_pool.receiving import OnAnswer, Owner, Receiving
from decode_pool.stats import DecodeStats
from decode_pool.token_outbox import TokenOutbox
from engine.events import (
    Admitted,
    CacheChanged,
    Computed,
    EngineStats,
    Event,
    Generated,
    Mode,
    Preempted,
    Reserved,
    Scored,
)
from engine.load import load_of
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff.decode_side import DecodeSide, DecodeTerms, Phase
from kv_transfer.paths import with_paths

_log = logging.getLogger(__name__)

_REFUSAL_BY_CODE = {"context_length_exceeded": "too_long", "invalid_token_id": "invalid"}


class Requests:
    """Lives in the worker's task; every method runs there. Implements `receiving.Owner`.

    Args:
        make_receiving: makes the handoffs' half, which is given the requests' half.
    """

    def __init__(
        self,
        record: WorkerRecord,
        config: KvTransferConfig,
        ports: DecodePorts,
        outbox: TokenOutbox,
        make_receiving: Callable[[Owner], Receiving],
        clock: Clock,
    ) -> None:
        self._record = record
        self._config = config
        self._ports = ports
        self._engine = ports.engine
        self._outbox = outbox
        self._clock = clock
        self._live: dict[RequestId, LiveRequest] = {}
        self._by_engine_id: dict[RequestId, LiveRequest] = {}
        self._handing_off: dict[RequestId, LiveRequest] = {}
        self._decisions = Counter(dict.fromkeys(PrefillDecision, 0))
        self._refusing = ""
        self._role = record.role
        self.receiving = make_receiving(self)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_open(self) -> int:
        """Requests in flight, and attempts whose blocks a late write may reach."""
        return len(self._live) + self.receiving.num_quarantined

    @property
    def is_idle(self) -> bool:
        """Whether nothing here has a deadline."""
        return not self._live and not self.receiving.is_settling

    def is_starving(self, stats: EngineStats) -> bool:
        """Whether the request that waits longest for blocks would fit if none were quarantined:
        however few it lacks, nobody overtakes it."""
        waiting = (
            live
            for live in self._live.values()
            if live.state is RequestState.WAITING or live.is_preempted
        )
        first = next(waiting, None)
        if first is None or not stats.blocks_quarantined:
            return False
        num_tokens = len(first.start.request.prompt) + max(first.next_index)
        num_wanted = -(-num_tokens // self._record.block_size)
        return num_wanted > stats.blocks_free + stats.blocks_cached

    def load(self, stats: EngineStats) -> WorkerLoad:
        """Return what routers hear of this pool, but for whether it drains."""
        receiving = self.receiving
        load = replace(load_of(stats), fences=receiving.num_fences)
        return with_paths(load, receiving.paths, self._clock.now())

    def refuse(self, reason: str) -> None:
        """Take no new request ("draining", "wrong_role"); "" takes them again."""
        self._refusing = reason

    def serve_as(self, role: Role) -> None:
        """What is computed here alone is told as colocated or local, as the role says."""
        self._role = role

    # --- the router says --------------------------------------------------------------------

    def start(self, stream: Stream[Any], message: StartRequest, added: OnAnswer) -> None:
        """Own a request, or refuse it.

        Args:
            added: called on the loop with the engine's answer; it calls `engine_answered`.
        """
        request_id = message.request.request_id
        if self._refusing:
            self._refuse(stream, message, self._refusing, "this worker takes no new requests")
            return
        if not message.candidates and not message.allow_local:
            self._refuse(stream, message, "no_prefill_worker", "no prefill worker was named")
            return
        slip = slip_of(message.request, message.remaining_s)
        if slip:
            self._refuse(stream, message, "invalid", slip)
            return
        before = self._live.get(request_id)
        if before is not None:
            if message.dispatch <= before.start.dispatch:
                return  # said twice, or overtaken by a newer dispatch
            self._end(before)
        live = self._new(stream, message)
        request = replace(message.request, request_id=live.engine_id)
        handoff = None if live.side is None else live.side.handoff
        mode = Mode.LOCAL if handoff is None else Mode.RECEIVE
        future = self._engine.call(lambda engine: engine.add(request, mode, handoff=handoff))
        future.add_done_callback(lambda done: added(live, done))

    def abort(self, message: AbortRequest) -> None:
        """End a request or one sample of it; say nothing more of it."""
        live = self._live.get(message.request_id)
        if live is None or live.start.dispatch != message.dispatch:
            return
        sample_index = message.sample_index
        if sample_index is None:
            self._end(live)
        elif sample_index in live.unfinished:
            live.finished.add(sample_index)
            self._engine.post(lambda engine: engine.abort(live.engine_id, sample_index))
            self.receiving.advance(live, d.SampleAborted(sample_index))
            self.end_if_over(live)

    def move(self, message: MoveRequest) -> None:
        """Stop a request that another worker will go on with; nothing of it follows."""
        live = self._live.get(message.request_id)
        if live is None or live.start.dispatch != message.dispatch or live.is_finished:
            return
        has_kv = live.has_kv
        self._end(live)
        if has_kv and self._ports.on_moved is not None:
            self._ports.on_moved(live.request_id)
        moved = RequestMoved(live.request_id, message.dispatch, has_kv)
        self._outbox.send(live.stream, moved)
        _log.info("moved away", extra={"request_id": live.request_id})

    def fail_over(self, message: str) -> None:
        """End all that is left, for routers to go on with elsewhere."""
        for live in list(self._live.values()):
            self._end(live)
            failed = RequestFailed(live.request_id, live.start.dispatch, message, retriable=True)
            self._outbox.send(live.stream, failed)

    def router_closed(self, stream: Stream[Any]) -> None:
        """Nobody hears the tokens of this stream's requests any more: end them."""
        for live in [live for live in self._live.values() if live.stream is stream]:
            self._end(live)

    # --- the engine says --------------------------------------------------------------------

    def engine_answered(self, live: LiveRequest, future: asyncio.Future[None]) -> None:
        """The engine queued a request, or would not."""
        try:
            future.result()
        except RequestError as error:
            if self._live.get(live.request_id) is live:
                reason = _REFUSAL_BY_CODE.get(error.code or "", "overloaded")
                self._forget(live)
                self._refuse_with_load(live, reason, error.message)
        except ValueError as error:  # a router's slip: a name twice, fields that disagree
            extra = {"request_id": live.request_id}
            _log.error("the engine does not take a request: %s", error, extra=extra)
            if self._live.get(live.request_id) is live:
                self._forget(live)
                self._refuse(live.stream, live.start, "invalid", str(error))

    def engine_says(self, events: list[Event]) -> None:
        """Take the events of a step; those of requests that ended meanwhile change nothing."""
        for event in events:
            self._engine_says(event)

    def _engine_says(self, event: Event) -> None:
        match event:
            case Generated():
                self._generated(event)
            case Scored():
                self._scored(event)
            case Reserved():
                self.receiving.reserved(event)
            case Admitted():
                self._admitted(event)
            case Preempted():
                self._preempted(event)
            case CacheChanged():
                self._ports.on_cache_changed(event)
            case Computed():
                return  # of a peer's prompt: the prefill pool is on the same engine
            case _:
                assert_never(event)

    def _preempted(self, event: Preempted) -> None:
        live = self._by_engine_id.get(event.request_id)
        if live is not None and not live.is_preempted:
            live.is_preempted = True
            self._ports.on_preempted(live.request_id)

    def _resumed(self, live: LiveRequest) -> None:
        """It runs again, or is over; the record of its preemption must not outlive it."""
        if live.is_preempted:
            live.is_preempted = False
            self._ports.on_resumed(live.request_id)

    def _generated(self, event: Generated) -> None:
        live = self._by_engine_id.get(event.request_id)
        if live is not None and event.sample_index not in live.finished:
            self._resumed(live)
            live.lifetime.stamp(Stamp.PREFILL_FINISHED, self._clock.now())
            self._send(live, event)
            self.end_if_over(live)

    def _scored(self, event: Scored) -> None:
        live = self._by_engine_id.get(event.request_id)
        if live is not None:
            self.emit_scores(live, event.logprobs)

    def _admitted(self, event: Admitted) -> None:
        live = self._by_engine_id.get(event.request_id)
        if live is None:
            return
        if live.is_handing_off:
            live.path.computed_here(PrefillDecision.LOCAL_HIT)
            self.receiving.advance(live, d.FoundLocally())
        live.state = RequestState.RUNNING
        now = self._clock.now()
        live.lifetime.stamp(Stamp.RESERVED, now)
        live.lifetime.stamp(Stamp.PREFILL_STARTED, now)
        if live.reported is None:
            live.path.blocks_reused_decode = event.cached_tokens // self._record.block_size
            live.path.found_cached(event.cached_tokens)

    # --- time -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let deadlines pass."""
        self.receiving.tick()
        now = self._clock.now()
        for live in [live for live in self._live.values() if now >= live.deadline]:
            if not live.is_handing_off:
                self.fail(live, "the request's time is over", retriable=False)

    def stats(self) -> DecodeStats:
        """Return gauges and counters."""
        states = Counter(dict.fromkeys(RequestState, 0))
        states.update(live.state for live in self._live.values())
        return DecodeStats(
            requests_by_state=dict(states),
            handoffs_by_outcome=dict(self.receiving.outcomes),
            decisions=dict(self._decisions),
            exposed_transfer=self.receiving.exposed.snapshot(),
            quarantined_attempts=self.receiving.num_quarantined,
            quarantine_s=self.receiving.quarantine_s,
            fences=self.receiving.num_fences,
            corrupt_writes=self.receiving.num_corrupt,
        )

    # --- receiving.Owner --------------------------------------------------------------------

    def find(self, handoff: HandoffId) -> LiveRequest | None:
        """See `Owner.find`."""
        return self._handing_off.get(handoff.request_id)

    def handing_off(self) -> list[LiveRequest]:
        """See `Owner.handing_off`."""
        return list(self._handing_off.values())

    def emit_first(self, live: LiveRequest, effect: d.EmitTokens) -> None:
        """See `Owner.emit_first`."""
        tokens = effect.tokens
        live.path.found_cached(tokens.cached_tokens)
        for sample in effect.samples:
            first = Generated(
                request_id=live.engine_id,
                sample_index=sample,
                start_index=0,
                token_ids=(tokens.token_ids[sample],),
                logprobs=tokens.logprobs[sample : sample + 1],
                finish_reason=tokens.finish_reasons[sample],
            )
            self._send(live, first)

    def emit_scores(self, live: LiveRequest, logprobs: PromptLogprobs) -> None:
        """See `Owner.emit_scores`. Another attempt tells again what one before had told."""
        news = logprobs.since(live.next_scored)
        if news is not None:
            assert news.start == live.next_scored, f"{live.engine_id}: a gap in its prompt's scores"
            live.next_scored = news.end
            scored = PromptScored(live.request_id, live.start.dispatch, news)
            self._outbox.send(live.stream, scored)

    def fail(self, live: LiveRequest, message: str, *, retriable: bool) -> None:
        """See `Owner.fail`."""
        failed = RequestFailed(live.request_id, live.start.dispatch, message, retriable)
        self._outbox.send(live.stream, failed)
        self._engine.post(lambda engine: engine.abort(live.engine_id))
        self._forget(live)
        extra = {"request_id": live.request_id}
        _log.warning("request failed: %s", message, extra=extra)

    def end_if_over(self, live: LiveRequest) -> None:
        """See `Owner.end_if_over`."""
        if live.side is not None and live.is_handing_off:
            if not live.is_finished:
                return
            live.state = RequestState.SETTLING
            if live.side.phase is Phase.QUEUED:  # its forced outputs had ended it
                self.receiving.advance(live, d.Aborted())
            return
        if self._handing_off.get(live.request_id) is live:
            del self._handing_off[live.request_id]
        if live.is_finished:
            self._forget(live)

    # --- one request ------------------------------------------------------------------------

    def _new(self, stream: Stream[Any], message: StartRequest) -> LiveRequest:
        now = self._clock.now()
        request = message.request
        alone = PrefillDecision.COLOCATED if self._role is Role.BOTH else PrefillDecision.LOCAL
        decision = PrefillDecision.DISAGGREGATED if message.candidates else alone
        outputs = request.outputs or ((),) * request.sampling.n
        live = LiveRequest(
            start=message,
            stream=stream,
            engine_id=engine_id_of(message),
            deadline=now + message.remaining_s,
            path=TracePath(decision),
            next_index=[len(tokens) for tokens in outputs],
        )
        live.lifetime.stamp(Stamp.RECEIVED, now)
        if decision is PrefillDecision.DISAGGREGATED:
            terms = DecodeTerms(
                boot=self._record.boot,
                block_size=self._record.block_size,
                candidates=message.candidates,
                allow_local=message.allow_local,
                deadline=live.deadline,
                try_s=self._config.try_s,
            )
            handoff = HandoffId(request.request_id, Attempt(message.dispatch, 1))
            live.side = DecodeSide(terms, request, handoff)
            self._handing_off[request.request_id] = live
        extra = {"request_id": live.request_id}
        _log.info("%d prompt tokens: %s", len(request.prompt), live.path.decision, extra=extra)
        self._live[request.request_id] = live
        self._by_engine_id[live.engine_id] = live
        return live

    def _send(self, live: LiveRequest, tokens: Generated) -> None:
        sample = tokens.sample_index
        assert tokens.start_index == live.next_index[sample], f"{live.engine_id}: a gap in tokens"
        live.next_index[sample] += len(tokens.token_ids)
        if tokens.finish_reason is not None:
            live.finished.add(sample)
        if live.reported is None or live.is_finished:
            self._report(live)
        update = TokenUpdate(
            request_id=live.request_id,
            sample_index=sample,
            dispatch=live.start.dispatch,
            start_index=tokens.start_index,
            token_ids=tokens.token_ids,
            logprobs=tokens.logprobs,
            finish_reason=tokens.finish_reason,
        )
        self._outbox.add(live.stream, update)

    def _report(self, live: LiveRequest) -> None:
        """Tell the path with the first token, and again before the last where it changed."""
        record = self._record
        trace = live.trace(record.worker_id, record.block_size, record.block_bytes)
        if live.reported is None:
            self._decisions[live.path.decision] += 1
        if trace != live.reported:
            live.reported = trace
            report = PathReport(live.request_id, live.start.dispatch, trace)
            self._outbox.send(live.stream, report)

    def _refuse(self, stream: Stream[Any], message: StartRequest, reason: str, text: str) -> None:
        request_id = message.request.request_id
        self._outbox.send(stream, RequestRefused(request_id, message.dispatch, reason, text))

    def _refuse_with_load(self, live: LiveRequest, reason: str, text: str) -> None:
        """The router should believe at once that this worker is full, not with a heartbeat."""
        refused = RequestRefused(live.request_id, live.start.dispatch, reason, text)
        looked = self._engine.call(lambda engine: engine.stats())
        looked.add_done_callback(partial(self._send_refused, live.stream, refused))

    def _send_refused(
        self, stream: Stream[Any], refused: RequestRefused, looked: asyncio.Future[EngineStats]
    ) -> None:
        """On the loop; changes nothing here."""
        if not looked.cancelled() and looked.exception() is None:
            is_draining = self._refusing == "draining"
            load = replace(self.load(looked.result()), is_draining=is_draining)
            refused = replace(refused, load=load)
        stream.send(refused)

    def _end(self, live: LiveRequest) -> None:
        """End it everywhere, and say nothing."""
        self.receiving.advance(live, d.Aborted())
        self._engine.post(lambda engine: engine.abort(live.engine_id))
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        if self._live.get(live.request_id) is live:
            del self._live[live.request_id]
            self._handing_off.pop(live.request_id, None)
        self._by_engine_id.pop(live.engine_id, None)
        self._resumed(live)
