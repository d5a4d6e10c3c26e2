"""A snapshot of the scheduler's gauges and counters."""

from __future__ import annotations

from engine.events import EngineStats
from engine.scheduling.sequence import Phase
from engine.scheduling.state import SchedulerState


def stats_of(state: SchedulerState) -> EngineStats:
    """Return the state's `EngineStats`; speeds are None here."""
    blocks, counters = state.memory.pool.counts(), state.counters
    preempted = sum(s.phase is Phase.PREEMPTED for s in state.retirement.leaving)
    return EngineStats(
        num_running=len(state.batch),
        num_waiting=len(state.waiting) + preempted,
        num_receiving=len(state.receiving),
        num_held=len(state.held),
        waiting_prompt_tokens=_waiting_prompt_tokens(state),
        blocks_total=blocks.total,
        blocks_free=blocks.free,
        blocks_cached=blocks.cached,
        blocks_owned=blocks.owned,
        blocks_reserved=blocks.reserved,
        blocks_quarantined=blocks.quarantined,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        preemptions=counters.preemptions,
        prompt_tokens_computed=counters.prompt_tokens_computed,
        prompt_tokens_cached=counters.prompt_tokens_cached,
        prompt_tokens_received=counters.prompt_tokens_received,
        generated_tokens=counters.generated_tokens,
        steps=counters.steps,
        block_copies=counters.block_copies,
        prefill_tokens_per_s=None,
        decode_step_s=None,
        iteration_tokens=tuple(counters.iteration_tokens),
        iteration_tokens_sum=counters.iteration_tokens_sum,
        peer_tokens_computed=counters.peer_tokens_computed,
        peer_tokens_cached=counters.peer_tokens_cached,
    )


def _waiting_prompt_tokens(state: SchedulerState) -> int:
    waiting = sum(len(sequence.token_ids) for sequence in state.waiting)
    return waiting + sum(s.num_behind for s in state.batch if s.is_catching_up())
