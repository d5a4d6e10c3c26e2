"""Blocks for running sequences: growth, copy-on-write, and preemption when they run out."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from core.ids import BlockId
from engine.executor.interface import TableEdit
from engine.scheduling.preemption import choose_victim
from engine.scheduling.sequence import Sequence
from engine.scheduling.settings import Drafter
from engine.scheduling.state import SchedulerState


class Demand(NamedTuple):
    """The next work of all running sequences, in order of service.

    Attributes:
        decoding: with the number of positions that it may reach, drafts included; None where it
            has the blocks for that, and may write them.
        catching_up: have prompt or recomputed tokens left for chunks.
        num_blocks: that it lacks, clones included.
    """

    decoding: list[tuple[Sequence, int | None]]
    catching_up: list[Sequence]
    num_blocks: int


class BlockSupply:
    """Secures the blocks that a step may write, for the worst case of accepted drafts."""

    def __init__(self, state: SchedulerState, drafter: Drafter | None) -> None:
        self._state = state
        self._drafter = drafter

    def num_drafts(self, sequence: Sequence) -> int:
        """Return how many drafts still fit into a decoding sequence's max_tokens."""
        if self._drafter is None:
            return 0
        room = sequence.run.max_tokens - sequence.num_outputs - sequence.num_to_come - 1
        return min(self._drafter.max_drafts, room)

    def make_room(self) -> Demand:
        """Preempt until every running sequence's next work has its blocks; return that work.

        Blocks that steps in flight hold back count as there already, else a full pool would
        preempt everybody while it waits for them.
        """
        state = self._state
        demand = self._survey()
        while demand.num_blocks > state.memory.num_available + state.retirement.num_coming:
            state.preempt(choose_victim(state.batch))
            demand = self._survey()
        return demand

    def secure(self, sequence: Sequence, end: int) -> bool:
        """Seat a sequence, and allocate and clone what its work up to position `end` needs.

        Returns:
            False: there is not enough.
        """
        state, table = self._state, sequence.blocks
        missing = table.num_missing(end)
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

    def _survey(self) -> Demand:
        pool = self._state.memory.pool
        decoding: list[tuple[Sequence, int | None]] = []
        catching_up: list[Sequence] = []
        num_missing = 0
        writers: list[BlockId] = []
        for sequence in self._state.batch:
            is_decoding = sequence.is_decoding()
            if is_decoding:
                end = sequence.num_scheduled + 1 + self.num_drafts(sequence)
            elif sequence.num_behind > 0:
                end = len(sequence.token_ids)
            else:
                continue
            table = sequence.blocks
            missing = table.num_missing(end)
            shared = table.writable_tail(sequence.num_computed, pool)
            num_missing += missing
            if shared is not None:
                writers.append(table.block_ids[shared])
            if is_decoding:
                decoding.append((sequence, end if missing or shared is not None else None))
            else:
                catching_up.append(sequence)
        # The last sharer writes in place.
        num_clones = sum(
            min(count, pool.num_holders(block_id) - 1)
            for block_id, count in Counter(writers).items()
        )
        return Demand(decoding, catching_up, num_missing + num_clones)
