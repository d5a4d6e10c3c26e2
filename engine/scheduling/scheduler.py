"""The scheduler: requests in, numbered plans out, results back.

    add -> waiting -> [admission] -> batch -> steps -> ended -> [retirement] -> cache
                  '-> receiving -> kv_arrived -> batch                (RECEIVE)
                                                 batch -> held -> release     (PREFILL)
           waiting <- [retirement] <- preempted <- batch

`schedule` may run with steps in flight that are not applied yet; `apply` takes their results in the
order of the plans. Every method is quick, none waits.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from core.errors import RequestError
from core.ids import HandoffId, RequestId
from core.request import EngineRequest
from engine.events import CacheChanged, EngineStats, Event, Generated, Mode
from engine.executor.interface import StepPlan, StepResult
from engine.scheduling.admission import Admission
from engine.scheduling.block_supply import BlockSupply
from engine.scheduling.consistency import check_invariants
from engine.scheduling.forking import fork
from engine.scheduling.results import Results
from engine.scheduling.sequence import Phase, RequestRun, Sequence
from engine.scheduling.settings import Drafter, SchedulerSettings
from engine.scheduling.snapshot import stats_of
from engine.scheduling.state import SchedulerState
from engine.scheduling.step_work import StepWork
from engine.token_rules import end_of


class Scheduler:
    """Decides what one replica computes.

    No method takes the time: order is by priority and arrival, forecasts count tokens, and
    deadlines and quarantine periods are the pools', who end attempts by calls.

    Args:
        settings: limits.
        fingerprint: the model's, part of every block hash.
        drafter: proposes speculative tokens; none by default.
    """

    def __init__(
        self, settings: SchedulerSettings, *, fingerprint: bytes, drafter: Drafter | None = None
    ) -> None:
        self._settings = settings
        self._state = SchedulerState(settings, fingerprint)
        supply = BlockSupply(self._state, drafter)
        self._work = StepWork(self._state, supply, drafter)
        self._admission = Admission(self._state, self._work)
        self._results = Results(self._state)
        self._num_arrived = 0

    @property
    def state(self) -> SchedulerState:
        """The queues and the memory; to be looked at, for invariants, and never changed."""
        return self._state

    def add(self, request: EngineRequest, mode: Mode, *, handoff: HandoffId | None = None) -> None:
        """Queue a request; see `EngineApi.add`.

        A sample that its forced outputs ended gets a `Generated` without tokens that says so, and
        does not run; where all have ended, the request is over with that.

        Raises:
            RequestError: too long for ever (400), or the queue is full (429).
            ValueError: the id or the handoff is of a request that is here still, or fields
                contradict each other.
        """
        if request.request_id in self._state.runs:
            msg = f"request {request.request_id} is here already"
            raise ValueError(msg)
        _check_fields(request, mode, handoff)
        self._check_fresh(handoff)
        _check_ids(request, self._settings.vocab_size)
        self._check_length(request, mode)
        if len(self._state.waiting) >= self._settings.max_waiting:
            msg = f"{len(self._state.waiting)} requests are waiting already; try again later"
            raise RequestError(msg, status=429, code="overloaded", retry_after_s=1.0)
        self._num_arrived += 1
        self._queue(RequestRun(request, mode, self._num_arrived, handoff), at_front=False)

    def kv_arrived(
        self,
        handoff: HandoffId,
        first_tokens: Ordered[int],
        *,
        num_received: int,
        num_peer_cached: int = 0,
    ) -> None:
        """A reservation is complete; see `EngineApi.kv_arrived`.

        Raises:
            KeyError: no reservation of that name.
            ValueError: not one first token a sample.
        """
        state = self._state
        request = state.handoffs[handoff].run.request
        forced = request.outputs or tuple((token,) for token in first_tokens)
        if len(forced) != request.sampling.n:
            msg = f"{handoff}: {len(forced)} first tokens for n = {request.sampling.n}"
            raise ValueError(msg)
        trunk = state.receiving.arrived(handoff)
        state.turn_local(trunk)
        run = trunk.run
        run.received_tokens = num_received
        run.peer_cached_tokens = num_peer_cached
        run.next_scored = None
        state.complete_prompt(run)
        num_full = len(trunk.token_ids) // self._settings.block_size
        state.memory.publish(trunk.hashes[:num_full], trunk.blocks)
        state.batch.join(trunk)
        fork(state, trunk, dict(enumerate(forced)))

    def retry(self, handoff: HandoffId, successor: HandoffId, request: EngineRequest) -> None:
        """Go on with fresh blocks under another name; see `EngineApi.retry`."""
        self._requeue(handoff, request, Mode.RECEIVE, successor)

    def compute_locally(self, handoff: HandoffId, request: EngineRequest) -> None:
        """Go on without a peer; see `EngineApi.compute_locally`."""
        self._requeue(handoff, request, Mode.LOCAL, None)

    def end_reservation(
        self, handoff: HandoffId, *, quarantine: bool, answered: bool = False
    ) -> None:
        """End a RECEIVE request that waits or receives; unknown attempts are ignored."""
        state = self._state
        sequence = state.handoffs.pop(handoff, None)
        if sequence is None:
            return
        if answered:
            run = sequence.run
            run.received_tokens = run.num_prompt - (run.cached_tokens or 0)
            state.complete_prompt(run)
        if handoff in state.receiving:
            state.receiving.end(handoff, quarantine=quarantine)
        state.end(sequence)

    def end_quarantine(self, handoff: HandoffId) -> int:
        """Free an attempt's quarantined blocks; returns how many."""
        return self._state.receiving.end_quarantine(handoff)

    def release(self, request_id: RequestId) -> None:
        """A PREFILL request's writes are done; one that still computes ends. Unknown ids are
        ignored."""
        self.abort(request_id)
        sequence = self._state.held.pop(request_id, None)
        if sequence is not None:
            sequence.phase = Phase.ENDED
            self._state.retirement.let_go(sequence)
            self._state.forget(sequence)

    def abort(self, request_id: RequestId, sample_index: int | None = None) -> None:
        """End a request or one sample of it; see `EngineApi.abort`. Unknown ids are ignored.

        A request that is receiving keeps its reservation until `end_reservation` or `kv_arrived`,
        which then starts nothing.
        """
        run = self._state.runs.get(request_id)
        if run is None:
            return
        run.live -= run.live.copy() if sample_index is None else {sample_index}
        for sequence in tuple(run.sequences):
            is_sample = sequence.num_first_tokens == 1 and sequence.num_outputs > 0
            if not run.live or (is_sample and sequence.sample_index not in run.live):
                self._end(sequence)

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None where nothing can be computed now.

        Every decoding sequence is served before any chunk; a step in which one could not be carries
        no chunk.
        """
        state = self._state
        catching_up = self._work.decode()
        if catching_up is not None:
            budget = self._work.chunks(catching_up, self._settings.chunk_tokens)
            if budget is not None:
                self._admission.admit(budget)
        assigned, num_copies = state.plan.assigned, state.plan.num_copies
        plan = state.plan.build()
        if plan is not None:
            state.counters.step(sum(w.num_query for w in plan.work), num_copies)
            self._results.expect(plan, assigned)
        return plan

    def apply(self, result: StepResult) -> None:
        """Apply the oldest step's results."""
        self._results.apply(result)

    def drain_events(self) -> list[Event]:
        """Return and forget what happened, in order; changes of the cache last."""
        events = self._state.events
        self._state.events = []
        stored, evicted = self._state.memory.cache.drain_changes()
        if stored or evicted:
            events.append(CacheChanged(stored, evicted))
        return events

    def stats(self) -> EngineStats:
        """Return gauges and counters; speeds are None, the engine measures them."""
        return stats_of(self._state)

    def check_invariants(self) -> None:
        """Assert that blocks, holders, queues and requests agree."""
        check_invariants(self._state)

    def _check_fresh(self, handoff: HandoffId | None) -> None:
        """Refuse an attempt's name that blocks here go by: late writes would count as its own."""
        state = self._state
        if handoff is None:
            return
        if handoff in state.handoffs or state.receiving.is_quarantined(handoff):
            msg = f"handoff {handoff} is here already"
            raise ValueError(msg)

    def _check_length(self, request: EngineRequest, mode: Mode) -> None:
        max_tokens = 1 if mode is Mode.PREFILL else request.sampling.max_tokens
        num_tokens = len(request.prompt) + max_tokens
        capacity = self._settings.num_blocks * self._settings.block_size
        # The last token's KV is never needed.
        limit = min(self._settings.max_model_len, capacity + 1)
        if num_tokens > limit:
            msg = (
                f"prompt of {len(request.prompt)} tokens + max_tokens = {max_tokens}: "
                f"must be at most {limit} together"
            )
            raise RequestError(msg, param="max_tokens", code="context_length_exceeded")

    def _queue(self, run: RequestRun, *, at_front: bool) -> None:
        state = self._state
        if run.mode is not Mode.PREFILL:
            self._end_by_forced_outputs(run)
        if not run.live:
            return
        state.runs[run.request_id] = run
        sequence = run.start()
        if run.handoff is not None:
            state.handoffs[run.handoff] = sequence
        state.waiting.push(sequence, at_front=at_front)

    def _end_by_forced_outputs(self, run: RequestRun) -> None:
        for sample_index, outputs in enumerate(run.request.outputs):
            reason = end_of(outputs, run.request.sampling)
            if reason is not None and sample_index in run.live:
                run.live.discard(sample_index)
                self._state.events.append(
                    Generated(run.request_id, sample_index, len(outputs), (), finish_reason=reason)
                )

    def _requeue(
        self,
        handoff: HandoffId,
        request: EngineRequest,
        mode: Mode,
        successor: HandoffId | None,
    ) -> None:
        before = self._state.handoffs[handoff].run
        self._check_fresh(successor)
        self.end_reservation(handoff, quarantine=True)
        run = RequestRun(request, mode, before.arrival, successor)
        run.live &= before.live
        run.is_prompt_counted = before.is_prompt_counted  # outputs since then change nothing
        self._queue(run, at_front=True)

    def _end(self, sequence: Sequence) -> None:
        state, run = self._state, sequence.run
        if sequence.phase is Phase.RECEIVING or sequence.phase is Phase.HELD:
            return
        if run.mode is Mode.PREFILL and sequence.phase is Phase.RUNNING:
            state.hold_for_peer(sequence)
            return
        if run.handoff is not None:
            state.handoffs.pop(run.handoff, None)
        elif run.request.outputs:
            state.complete_prompt(run)  # of an answer that went on here, and is cut off
        state.end(sequence)


def _check_ids(request: EngineRequest, vocab_size: int | None) -> None:
    """Refuse ids that the embedding has no row for: they would end the step, and the worker."""
    known = (request.prompt, *request.outputs)
    largest = max((max(ids) for ids in known if ids), default=0)
    if vocab_size is not None and largest >= vocab_size:
        msg = f"prompt: token id {largest} must be below {vocab_size}, the model's vocabulary"
        raise RequestError(msg, param="prompt", code="invalid_token_id")


def _check_fields(request: EngineRequest, mode: Mode, handoff: HandoffId | None) -> None:
    if not request.prompt:
        msg = f"request {request.request_id}: the prompt is empty"
        raise ValueError(msg)
    if len(request.outputs) not in (0, request.sampling.n):
        msg = f"{len(request.outputs)} forced outputs for n = {request.sampling.n}"
        raise ValueError(msg)
    if (handoff is not None) != (mode is Mode.RECEIVE):
        msg = f"mode {mode.value} with handoff {handoff}: RECEIVE has one, the others none"
        raise ValueError(msg)
