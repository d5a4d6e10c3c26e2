"""Applies a step's results: progress, tokens, ends, forks."""

from __future__ import annotations

from collections import deque

from core.request import PromptLogprobs, TokenLogprobs
from engine.events import Computed, Generated, Mode, Scored
from engine.executor.interface import SlotResult, SlotWork, StepPlan, StepResult
from engine.scheduling.forking import fork
from engine.scheduling.sequence import Phase, RequestRun, Sequence
from engine.scheduling.state import SchedulerState
from engine.token_rules import accept

_PROGRESSING = (Phase.RUNNING, Phase.PREEMPTED)


class Results:
    """The steps in flight, oldest first, and what becomes of their results."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()

    def expect(self, plan: StepPlan, assigned: list[Sequence]) -> None:
        """A plan was handed out; `assigned` are the sequences behind its work items."""
        self._in_flight.append((plan, assigned))
        self._state.retirement.submitted(plan.number)

    def apply(self, result: StepResult) -> None:
        """Apply the results of the oldest step in flight."""
        plan, assigned = self._in_flight.popleft()
        assert result.number == plan.number
        for sequence, work, slot_result in zip(assigned, plan.work, result.results, strict=True):
            assert slot_result.slot == work.slot
            sequence.pending.popleft()
            if sequence.phase in _PROGRESSING:
                self._apply(sequence, work, slot_result)
        self._state.retirement.applied(plan.number)

    def _apply(self, sequence: Sequence, work: SlotWork, result: SlotResult) -> None:
        run = sequence.run
        if result.prompt_logprobs is not None:
            self._score(run, result.prompt_logprobs)
        if work.num_samples and not result.token_ids:
            # Nothing was accepted: the last known token is to be computed and sampled again.
            sequence.num_computed = len(sequence.token_ids) - 1
            return
        sequence.num_computed += work.num_query
        if _is_chunk(sequence, work):
            self._progress(sequence)
        if sequence.num_computed < run.num_prompt:
            return
        self._state.complete_prompt(run)
        if run.mode is Mode.PREFILL:
            self._finish_prefill(sequence, result)
        elif sequence.num_first_tokens == 1:
            if work.num_samples:
                self._extend(sequence, result)
        elif sequence.num_computed == len(sequence.token_ids):
            self._fork(sequence, result)

    def _score(self, run: RequestRun, logprobs: PromptLogprobs) -> None:
        """Tell what was not told; a preempted prompt's blocks are computed again."""
        news = logprobs.since(run.next_scored or run.num_prompt)
        if news is None:
            return
        assert news.start == run.next_scored, f"{run.request_id}: prompt tokens without a score"
        run.next_scored = news.end if news.end < run.num_prompt else None
        self._state.events.append(Scored(run.request_id, news))

    def _progress(self, sequence: Sequence) -> None:
        """A chunk is computed: its full blocks become matchable."""
        state, run = self._state, sequence.run
        num_full = sequence.num_computed // state.settings.block_size
        state.memory.publish(sequence.hashes[:num_full], sequence.blocks)
        if run.mode is Mode.PREFILL:
            state.events.append(Computed(run.request_id, sequence.num_computed))

    def _extend(self, sequence: Sequence, result: SlotResult) -> None:
        """Append a sample's accepted tokens, up to the one that ends it."""
        state, run = self._state, sequence.run
        start = sequence.num_outputs
        count, reason = accept(result.token_ids, start, run.request.sampling)
        token_ids = result.token_ids[:count]
        sequence.token_ids.extend(token_ids)
        sequence.num_computed = len(sequence.token_ids) - 1
        state.counters.generated_tokens += count
        logprobs = result.logprobs[:count]
        state.events.append(
            Generated(run.request_id, sequence.sample_index, start, token_ids, logprobs, reason)
        )
        if reason is not None:
            run.live.discard(sequence.sample_index)
            state.history.record(sequence.num_outputs)
            state.end(sequence)

    def _fork(self, trunk: Sequence, result: SlotResult) -> None:
        run = trunk.run
        if run.request.outputs:
            fork(self._state, trunk, dict(enumerate(run.request.outputs)))
            return
        self._emit_first_tokens(trunk, result)
        fork(self._state, trunk, {i: (token,) for i, token in enumerate(result.token_ids)})

    def _finish_prefill(self, sequence: Sequence, result: SlotResult) -> None:
        self._emit_first_tokens(sequence, result)
        self._state.hold_for_peer(sequence)

    def _emit_first_tokens(self, sequence: Sequence, result: SlotResult) -> None:
        """Tell each live sample's first token; none where outputs were forced."""
        run = sequence.run
        for sample_index, token_id in enumerate(result.token_ids):
            if sample_index not in run.live:
                continue
            _, reason = accept((token_id,), 0, run.request.sampling)
            logprobs: tuple[TokenLogprobs, ...] = result.logprobs[sample_index : sample_index + 1]
            self._state.counters.generated_tokens += 1
            self._state.events.append(
                Generated(run.request_id, sample_index, 0, (token_id,), logprobs, reason)
            )


def _is_chunk(sequence: Sequence, work: SlotWork) -> bool:
    """Whether known tokens were computed, rather than one generated token and its drafts."""
    is_one_token = work.num_query == 1 + len(work.drafts)
    return not (work.num_samples and is_one_token and sequence.num_outputs)
