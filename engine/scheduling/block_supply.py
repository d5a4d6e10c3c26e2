"""Blocks for running sequences: growth, copy-on-write, and preemption when they run out."""

from __future__ import annotations

from collections import Counter

from core.ids import BlockId
from engine.executor.interface import TableEdit
from engine.scheduling.preemption import choose_victim
from engine.scheduling.sequence import Sequence
from engine.scheduling.settings import Drafter
from engine.scheduling.state import SchedulerState


class BlockSupply:
    """Secures the blocks that a step may write, for the worst case of accepted drafts."""

    def __init__(self, state: SchedulerState, drafter: Drafter) -> None:
        self._state = state
        self._drafter = drafter

    def end_of_work(self, sequence: Sequence) -> int:
        """Return the number of positions that a running sequence's next work may reach."""
        if sequence.is_decoding():
            return sequence.num_scheduled + 1 + self.num_drafts(sequence)
        return len(sequence.token_ids)

    def num_drafts(self, sequence: Sequence) -> int:
        """Return how many drafts still fit into a decoding sequence's max_tokens."""
        if not self._drafter.max_drafts:
            return 0
        room = sequence.max_tokens - sequence.num_outputs - sequence.num_to_come - 1
        return min(self._drafter.max_drafts, room)

    def make_room(self) -> None:
        """Preempt until every running sequence's next work has its blocks.

        Blocks that steps in flight hold back count as there already, else a full pool would
        preempt everybody while it waits for them.
        """
        state = self._state
        while self._num_wanted() > state.memory.num_available + state.retirement.num_coming:
            state.preempt(choose_victim(state.batch))

    def secure(self, sequence: Sequence) -> bool:
        """Seat a sequence, and allocate and clone what its next work needs; False: not enough."""
        state, table = self._state, sequence.blocks
        missing = table.num_missing(self.end_of_work(sequence))
        shared = table.writable_tail(sequence.num_computed, state.memory.pool)
        if missing + (shared is not None) > state.memory.num_available:
            return False
        slot = state.batch.seat(sequence)
        if missing:
            fresh = state.memory.allocate(missing)
            table.append(fresh)
            state.plan.append_blocks(slot, table.group, fresh)
        if shared is not None:
            clone = state.memory.allocate(1)[0]
            source = table.replace(shared, clone)
            state.memory.release((), [source])
            state.retirement.wait_for(state.plan.number)
            state.plan.clone(TableEdit(slot, table.group, shared, clone), source)
        return True

    def _num_wanted(self) -> int:
        pool = self._state.memory.pool
        num_missing = 0
        num_writers: Counter[BlockId] = Counter()
        for sequence in self._state.batch:
            if not (sequence.is_decoding() or sequence.is_catching_up()):
                continue
            table = sequence.blocks
            num_missing += table.num_missing(self.end_of_work(sequence))
            shared = table.writable_tail(sequence.num_computed, pool)
            if shared is not None:
                num_writers[table.block_ids[shared]] += 1
        # The last sharer writes in place.
        num_clones = sum(
            min(count, pool.num_holders(block_id) - 1) for block_id, count in num_writers.items()
        )
        return num_missing + num_clones
