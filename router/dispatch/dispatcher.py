"""The router's inner half: requests in, tokens out, over one stream to every worker.

    start() -> LiveRequest -> Placement -> StartRequest -----> worker
       |                         ^                               |
    RequestStream <- updates <- RequestState <- TokenBatch ------+
                                  |
                                  +-> Dispatch again, Abort, End

Everything runs on the event loop in plain callbacks: a token costs one method call of its request's
machine and one append, and no task or future of its own. The only tasks are one a link, which keeps
its stream open, and one for all timers; `run` owns them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import assert_never

import msgspec

from control_plane.registry import WorkerChange, WorkerSeen, WorkerSuspect
from control_plane.rpc.refusals import PeersRefused
from core.back_off import Dice
from core.block_hash import BlockHash
from core.clock import Clock
from core.config import Config
from core.errors import RequestError
from core.ids import Boot, RequestId, WorkerId
from core.lifetime import Lifetime, PrefillDecision
from core.messages import (
    AbortRequest,
    MoveRequest,
    PathReport,
    PromptScored,
    RequestFailed,
    RequestMoved,
    RequestRefused,
    TokenBatch,
    WorkerLoad,
    WorkerOrder,
    WorkerToRouter,
)
from core.request import FinishReason, PromptLogprobs, TokenUpdate
from core.worker_record import Hello, Role
from router.dispatch.deadlines import Deadlines
from router.dispatch.failure import Trouble, error_of
from router.dispatch.interface import GenerateRequest, ServedModel
from router.dispatch.live_request import LiveRequest
from router.dispatch.metrics import DispatchMetrics
from router.dispatch.placement import Placement
from router.dispatch.recent_requests import RecentRequests
from router.dispatch.request_state import (
    Abort,
    Dispatch,
    Effect,
    End,
    Phase,
    RequestState,
    RetryRules,
)
from router.dispatch.status import worker_status
from router.dispatch.token_stream import RequestStream
from router.dispatch.worker_link import Connect, Dial, LinkState, WorkerLink
from router.dispatch.worker_table import WorkerTable, key_of
from router.policy.decision import Reason
from router.policy.staffing import can_serve

_log = logging.getLogger(__name__)


class RouterDispatcher:
    """Implements `router.dispatch.interface.Dispatcher`.

    Args:
        config: the sections router, disaggregation, engine (chunk_tokens) and control_plane are
            read.
        hello: what this router says first on every stream; kind "router".
        connect: `control_plane.rpc.client.connect`.
        clock: its `now` must advance as the event loop's time does while `run` is running.
        rng: this router's own: those that draw alike would choose alike.
        refused: counts workers of another model or layout; `connect` may count in it, too.
        rules: how long trouble is borne.
    """

    def __init__(  # noqa: PLR0913 - keyword-only wiring, called once
        self,
        config: Config,
        *,
        hello: Hello,
        connect: Connect,
        clock: Clock,
        rng: Dice,
        rules: RetryRules | None = None,
        refused: PeersRefused | None = None,
    ) -> None:
        self._config = config
        self._is_strict = config.disaggregation.fallback == "strict"
        self._clock = clock
        self._rng = rng
        self._rules = rules or RetryRules()
        dial = Dial(hello, connect, config.control_plane, clock, rng)
        self._workers = WorkerTable(self, dial, refused or PeersRefused())
        self._live: dict[RequestId, LiveRequest] = {}
        self._recent = RecentRequests()
        self._deadlines = Deadlines(clock, self._tick)
        self._stopping = asyncio.Event()
        self.metrics = DispatchMetrics(self.requests_by_state, self._workers.by_state)
        self._placement = Placement(config, self._workers, self.metrics, clock, rng)

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the streams open and the deadlines kept until `stop`; owns all tasks."""
        async with asyncio.TaskGroup() as group:
            self._workers.keep_open(group)
            deadlines = group.create_task(self._deadlines.run(), name="request deadlines")
            await self._stopping.wait()
            for live in list(self._live.values()):
                self._do(live, live.state.abort(error_of(Trouble.STOPPING, "")))
            self._workers.drop_all("the router stops")
            deadlines.cancel()

    async def stop(self) -> None:
        """End all requests with 503, close all streams, and let `run` return."""
        self._stopping.set()

    # -- what the registry and the ledger say ----------------------------------------------------

    def on_worker_change(self, change: WorkerChange) -> None:
        """Take what `Registry.watch_workers` tells."""
        match change:
            case WorkerSeen(record):
                boot = self._placement.index.boot_of(record.worker_id)
                if boot is not None and boot != record.boot:
                    self._placement.index.forget(record.worker_id)  # blocks of the life before
                if self._workers.seen(record):
                    self._came_up()
            case WorkerSuspect(worker_id, boot):
                self._workers.unregistered(worker_id, boot)
            case _:
                assert_never(change)

    def on_snapshot(self, worker_id: WorkerId, boot: Boot, hashes: Iterable[BlockHash]) -> None:
        """Take all block hashes that a worker holds."""
        self._placement.index.apply_snapshot(worker_id, boot, hashes)

    def on_delta(
        self,
        worker_id: WorkerId,
        boot: Boot,
        stored: Iterable[BlockHash],
        evicted: Iterable[BlockHash],
    ) -> None:
        """Take what changed."""
        self._placement.index.apply_delta(worker_id, boot, stored, evicted)

    def on_gone(self, worker_id: WorkerId) -> None:
        """A worker's ledger is gone: route as if it held nothing."""
        self._placement.index.forget(worker_id)

    def on_preempted(self, worker_id: WorkerId, boot: Boot, num_requests: int) -> None:
        """So many requests have lost their blocks there: what was before our time counts too."""
        self._workers.preempted(worker_id, boot, num_requests)

    # -- Dispatcher ------------------------------------------------------------------------------

    def served_model(self) -> ServedModel | None:
        """Return the model that is served; a live worker of it keeps it so."""
        return self._workers.served_model()

    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        roles, paired = self._workers.roles_alive()
        is_strict = self._is_strict
        return Role.BOTH in roles or can_serve(paired if is_strict else roles, is_strict=is_strict)

    def num_requests(self) -> int:
        """Return requests in flight."""
        return len(self._live)

    def requests_by_state(self) -> dict[str, int]:
        """Return requests in flight by state; they sum to `num_requests`."""
        counts = Counter(live.state.phase.value for live in self._live.values())
        return {phase.value: counts[phase.value] for phase in Phase if phase is not Phase.ENDED}

    def cluster_status(self) -> dict[str, object]:
        """Return what `/status` shows, as JSON can say it."""
        model = self.served_model()
        return {
            "model": model.name if model else "",
            "ready": self.is_ready(),
            "workers": [worker_status(link) for link in self._workers],
            "requests": self.requests_by_state(),
            "attempts": self.metrics.attempts(),
            "indexed_blocks": len(self._placement.index),
        }

    def start(self, request: GenerateRequest, lifetime: Lifetime) -> RequestStream:
        """Begin; returns at once. What goes wrong later comes out of the stream.

        Raises:
            RequestError: 503 when no worker is known, 400 when none can ever hold it or its id is
                that of a live request.
        """
        request_id = request.request.request_id
        if request_id in self._live:
            msg = f"x-request-id = {request_id!r}: a request of this id is running; use another"
            raise RequestError(msg, param="x-request-id", code="duplicate_request_id")
        model = self.served_model()
        if model is None or self._stopping.is_set():
            raise error_of(Trouble.NO_WORKER, "")
        live = self._new_request(request, model, lifetime)
        self._live[request_id] = live
        self._do(live, live.state.begin())
        if live.stream.error is not None:
            raise live.stream.error
        return live.stream

    def cancel(self, request_id: RequestId) -> None:
        """Abort by id: its running samples finish with `abort`; unknown ids are ignored."""
        live = self._live.get(request_id)
        if live is None:
            return
        for index, num_tokens in live.state.unfinished():
            number = live.state.number
            update = TokenUpdate(
                request_id, index, number, num_tokens, (), finish_reason=FinishReason.ABORT
            )
            live.stream.put(update)
        self._do(live, live.state.abort())

    def order(self, worker_id: WorkerId, order: WorkerOrder, *, is_forced: bool = False) -> None:
        """Send a worker an operator's order; see `Dispatcher.order`."""
        self._workers.order(worker_id, order, is_forced=is_forced, is_strict=self._is_strict)

    def _new_request(
        self, request: GenerateRequest, model: ServedModel, lifetime: Lifetime
    ) -> LiveRequest:
        engine_request = request.request
        deadline = self._clock.now() + request.timeout_s
        return LiveRequest(
            request,
            RequestState(engine_request, deadline=deadline, rules=self._rules),
            RequestStream(
                engine_request.request_id,
                lifetime,
                on_abort=self.cancel,
                on_finish_sample=self._finish_sample,
            ),
            deadline=deadline,
            model=key_of(model),
            hashes=self._placement.hashes(engine_request, model),
        )

    def _finish_sample(self, request_id: RequestId, sample_index: int) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self._do(live, live.state.finish_sample(sample_index))

    # -- LinkOwner -------------------------------------------------------------------------------

    def link_opened(self, link: WorkerLink) -> None:
        """A worker can be sent to: who waits for one goes on."""
        record = link.record
        _log.info("stream to %s (%s, boot %s) is open", record.worker_id, record.role, record.boot)
        self._came_up()

    def _came_up(self) -> None:
        """A worker serves that did not, or in another role: who waits for one goes on."""
        self._workers.settle()
        for live in list(self._live.values()):
            self._do(live, live.state.worker_came_up())

    def link_message(self, link: WorkerLink, message: WorkerToRouter) -> None:
        """Take what a worker says."""
        match message:
            case TokenBatch():
                self._take_tokens(link, message.updates)
            case WorkerLoad():
                self._take_load(link, message)
            case PathReport():
                self._take_report(message)
            case RequestRefused(load=WorkerLoad() as load):
                self._take_load(link, load)
                self._advance(message)
            case PromptScored() | RequestRefused() | RequestFailed() | RequestMoved():
                self._advance(message)
            case _:
                assert_never(message)

    def _advance(
        self, message: PromptScored | RequestRefused | RequestFailed | RequestMoved
    ) -> None:
        """Tell a request's machine what its worker says."""
        live = self._live.get(message.request_id)
        if live is None:
            return
        now, number, state = self._clock.now(), message.dispatch, live.state
        match message:
            case PromptScored(logprobs=logprobs):
                effects = state.scored(number, logprobs, now)
            case RequestRefused(reason=reason, message=why):
                effects = state.refused(number, reason, why, now)
            case RequestFailed(message=why, retriable=retriable):
                effects = state.failed(number, why, now, retriable=retriable)
            case RequestMoved(has_kv=has_kv):
                effects = state.moved(number, now, has_kv=has_kv)
        self._do(live, effects)

    def link_suspected(self, link: WorkerLink, *, suspect: bool) -> None:
        """Give its requests the grace of a suspect, or take that back."""
        worker_id = link.record.worker_id
        if suspect and self._workers.drop_if_dead(link):
            return
        now = self._clock.now()
        for live in self._requests_of(link):
            live.state.suspect(worker_id, now, suspect=suspect)
            self._deadlines.set(live.request.request_id, live.state.due())

    def link_lost(self, link: WorkerLink, reason: str) -> None:
        """Send its requests elsewhere."""
        worker_id = link.record.worker_id
        level = logging.INFO if link.state is LinkState.GONE else logging.WARNING
        _log.log(level, "stream to %s was lost: %s", worker_id, reason)
        self._workers.settle()
        now = self._clock.now()
        for live in self._requests_of(link):
            self._do(live, live.state.stream_lost(worker_id, reason, now))
        self._workers.drop_if_dead(link)

    def _requests_of(self, link: WorkerLink) -> list[LiveRequest]:
        # Sorted: a set of texts has another order in every process, a simulation must have one.
        return [self._live[request_id] for request_id in sorted(link.requests)]

    # -- what workers say ------------------------------------------------------------------------

    def _take_tokens(self, link: WorkerLink, updates: Sequence[TokenUpdate]) -> None:
        now = self._clock.now()
        requests = self._live
        for update in updates:
            live = requests.get(update.request_id)
            if live is None:
                self._hear_unknown(link, update)
                continue
            effects = live.state.updated(update, now)
            if len(effects) == 1 and isinstance(effects[0], TokenUpdate):  # nearly all
                if live.first_token_at is None:
                    self._placement.first_token(live, now)
                live.stream.put(effects[0])
            else:
                self._do(live, effects)

    def _hear_unknown(self, link: WorkerLink, update: TokenUpdate) -> None:
        """Tell a worker once to abort what this router does not know; an ended request's worker was
        told when it ended."""
        self.metrics.twin_heard()
        if update.request_id not in self._recent:
            self._recent.remember(update.request_id)
            link.send(AbortRequest(update.request_id, update.dispatch))

    def _take_load(self, link: WorkerLink, load: WorkerLoad) -> None:
        now = self._clock.now()
        was_draining = link.is_draining
        link.take_load(load, now)
        if link.is_draining:
            self._move_away(link)
        elif was_draining:
            self._came_up()
        if load.num_running or load.num_waiting or load.num_receiving or not link.requests:
            link.idle_since = None
            return
        if link.idle_since is None:
            link.idle_since = now
        if now - link.idle_since >= self._rules.silence_s:
            for live in self._requests_of(link):
                self._do(live, live.state.disowned(link.record.worker_id, now))

    def _move_away(self, link: WorkerLink) -> None:
        """Have a worker that drains stop what could go on elsewhere; all else finishes there."""
        for live in self._requests_of(link):
            number = live.state.number
            worker_id = link.record.worker_id
            if live.asked_to_move != number and self._placement.has_another(live, worker_id):
                live.asked_to_move = number
                link.send(MoveRequest(live.request.request_id, number))

    def _take_report(self, report: PathReport) -> None:
        live = self._live.get(report.request_id)
        if live is None or report.dispatch != live.state.number or live.decision is None:
            return
        trace = report.trace
        is_local = trace.decision is PrefillDecision.LOCAL
        if is_local and live.decision.reason is Reason.FALLBACK:  # the worker was not told why
            trace = msgspec.structs.replace(trace, decision=PrefillDecision.FALLBACK)
        if live.state.has_lost_a_start and live.stream.trace is None:
            trace = msgspec.structs.replace(trace, cached_tokens=0)
        live.stream.report(trace, live.state.num_dispatches)

    # -- what machines want ----------------------------------------------------------------------

    def _do(self, live: LiveRequest, effects: Sequence[Effect]) -> None:
        """Carry effects out, and those that follow from them."""
        for effect in effects:
            match effect:
                case TokenUpdate():
                    if live.first_token_at is None:
                        self._placement.first_token(live, self._clock.now())
                    live.stream.put(effect)
                case PromptLogprobs():
                    live.stream.put_prompt_logprobs(effect)
                case Dispatch():
                    self._placement.leave(live)
                    self._do(live, self._placement.place(live, effect))
                case Abort():
                    link = self._workers.get(effect.worker_id)
                    if link is not None:
                        request_id = live.request.request_id
                        link.send(AbortRequest(request_id, effect.number, effect.sample_index))
                case End():
                    self._end(live, effect.error)
                case _:
                    assert_never(effect)
        if live.state.phase is not Phase.ENDED:
            self._deadlines.set(live.request.request_id, live.state.due())

    def _end(self, live: LiveRequest, error: RequestError | None) -> None:
        request_id = live.request.request_id
        self._placement.leave(live)
        if self._live.pop(request_id, None) is not None:
            self._deadlines.discard(request_id)
            self._recent.remember(request_id)
            self.metrics.ended(live.num_attempts)
            if error is None:
                self._placement.ended(live)
        live.stream.end(error)

    def _tick(self, request_id: RequestId) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self._do(live, live.state.tick(self._clock.now()))
