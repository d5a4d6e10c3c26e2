"""What must hold between calls; run by tests after every step and by workers when idle."""

from __future__ import annotations

from collections import Counter

from core.ids import BlockId
from engine.scheduling.sequence import Phase, Sequence
from engine.scheduling.state import SchedulerState


def check_invariants(state: SchedulerState) -> None:
    """Assert the parts alone, and what they say about each other.

    Raises:
        AssertionError: something does not hold; the state is not to be trusted any more.
    """
    state.memory.check_invariants()
    state.batch.check_invariants()
    state.receiving.check_invariants()
    _check_holders(state)
    _check_phases(state)


def _with_blocks(state: SchedulerState) -> list[Sequence]:
    return [*state.batch, *state.held.values(), *state.retirement.leaving]


def _check_holders(state: SchedulerState) -> None:
    """Every block has as many holders as tables that name it."""
    holders: Counter[BlockId] = Counter()
    for sequence in _with_blocks(state):
        holders.update(sequence.block_ids)
    for sequence in state.receiving:
        holders.update(sequence.block_ids[: sequence.blocks.num_shared])
    pool = state.memory.pool
    assert len(holders) == pool.counts().owned
    for block_id, count in holders.items():
        assert pool.num_holders(block_id) == count


def _check_phases(state: SchedulerState) -> None:
    """Every sequence of every request is in the one queue of its phase."""
    expected = [
        *((sequence, Phase.WAITING) for sequence in state.waiting),
        *((sequence, Phase.RECEIVING) for sequence in state.receiving),
        *((sequence, Phase.RUNNING) for sequence in state.batch),
        *((sequence, Phase.HELD) for sequence in state.held.values()),
        *((s, Phase.PREEMPTED) for s in state.retirement.leaving if s.phase is Phase.PREEMPTED),
    ]
    assert all(sequence.phase is phase for sequence, phase in expected)
    named = {id(s) for run in state.runs.values() for s in run.sequences}
    assert named == {id(sequence) for sequence, _ in expected}
    assert len(named) == len(expected)
    assert all(state.handoffs[handoff].run.handoff == handoff for handoff in state.handoffs)
