"""Who leaves the waiting queue: in order, by forecast, whole prompts or nothing.

Nobody overtakes a request that waits for memory, so none starves. A request that waits for
something else may be overtaken by the other kind: a RECEIVE that waits for other receptions to end,
by a prompt computed here; a prompt that waits for the step's budget, by a RECEIVE.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from core.ids import BlockId
from engine.events import Admitted, Mode, Reserved
from engine.memory.block_table import BlockTable
from engine.scheduling.forecast import Growth, peak_tokens
from engine.scheduling.sequence import Sequence
from engine.scheduling.state import SchedulerState
from engine.scheduling.step_work import StepWork


class Verdict(enum.Enum):
    """What became of a look at a waiting sequence."""

    ADMITTED = "admitted"
    NOT_YET = "not yet"
    """Its kind waits for budget, slots or receptions."""
    NO_MEMORY = "no memory"
    """Everybody behind waits too."""


class Admission:
    """Moves sequences from the waiting queue into the batch or the reservations."""

    def __init__(self, state: SchedulerState, work: StepWork) -> None:
        self._state = state
        self._work = work
        self._block_size = state.settings.block_size

    def admit(self, budget: int) -> None:
        """Admit what fits; prompts computed here start with a chunk of what is left of `budget`."""
        is_closed = {Mode.LOCAL: False, Mode.RECEIVE: False}
        for sequence in self._state.waiting:
            if is_closed[Mode.LOCAL] and sequence.run.mode is not Mode.RECEIVE:
                continue
            kind = self._kind(sequence)
            if is_closed[kind]:
                continue
            hits = self._hits(sequence)
            if kind is Mode.RECEIVE:
                verdict = self._reserve(sequence, hits)
            else:
                verdict, used = self._start(sequence, hits, budget)
                budget -= used
            if verdict is Verdict.NO_MEMORY:
                return
            is_closed[kind] = verdict is Verdict.NOT_YET
            if all(is_closed.values()):
                return

    def _kind(self, sequence: Sequence) -> Mode:
        """RECEIVE with all reusable blocks here is computed here; PREFILL is, too.

        Every step asks this of every waiting RECEIVE, so it looks up one block, not all.
        """
        memory, run = self._state.memory, sequence.run
        memory.extend_hashes(sequence.hashes, sequence.token_ids, run.request.namespace)
        if run.mode is not Mode.RECEIVE:
            return Mode.LOCAL
        if run.next_scored is not None:
            return Mode.RECEIVE
        num_reusable = memory.num_reusable(len(sequence.token_ids))
        is_here = memory.holds_prefix(sequence.hashes, num_reusable)
        return Mode.LOCAL if is_here else Mode.RECEIVE

    def _hits(self, sequence: Sequence) -> list[BlockId]:
        """Return the cached blocks to use: none with a position whose logits are asked for."""
        hits = self._state.memory.match(sequence.hashes, len(sequence.token_ids))
        next_scored = sequence.run.next_scored
        return hits if next_scored is None else hits[: (next_scored - 1) // self._block_size]

    def _reserve(self, sequence: Sequence, hits: list[BlockId]) -> Verdict:
        state, handoff = self._state, sequence.run.handoff
        assert handoff is not None
        num_fresh = self._num_fresh(sequence, hits)
        if not (self._has_seats(sequence) and state.receiving.has_room(num_fresh)):
            return Verdict.NOT_YET
        if not self._fits(sequence, hits, num_fresh):
            return Verdict.NO_MEMORY
        state.waiting.remove(sequence)
        state.receiving.reserve(handoff, sequence, hits)
        self._note_first_admission(sequence, hits)
        state.events.append(Reserved(handoff, tuple(sequence.block_ids), len(hits)))
        return Verdict.ADMITTED

    def _start(self, sequence: Sequence, hits: list[BlockId], budget: int) -> tuple[Verdict, int]:
        state = self._state
        sequence.num_computed = len(hits) * self._block_size
        num_query = self._work.chunk_of(sequence, budget)
        if not (num_query and self._has_seats(sequence)):
            return self._stay(sequence, Verdict.NOT_YET)
        num_fresh = self._num_fresh(sequence, hits)
        if not self._fits(sequence, hits, num_fresh):
            return self._stay(sequence, Verdict.NO_MEMORY)
        state.waiting.remove(sequence)
        self._allocate(sequence, hits, num_fresh)
        state.turn_local(sequence)
        if self._note_first_admission(sequence, hits):
            run = sequence.run
            block_ids = tuple(sequence.block_ids)
            state.events.append(
                Admitted(run.request_id, run.mode, block_ids, self._num_cached(sequence, hits))
            )
        state.batch.join(sequence)
        return Verdict.ADMITTED, self._work.chunk(sequence, num_query)

    def _stay(self, sequence: Sequence, verdict: Verdict) -> tuple[Verdict, int]:
        sequence.num_computed = 0
        return verdict, 0

    def _allocate(self, sequence: Sequence, hits: list[BlockId], num_fresh: int) -> None:
        memory = self._state.memory
        memory.hold(hits)
        table = BlockTable(self._block_size, hits)
        table.append(memory.allocate(num_fresh))
        sequence.table = table
        if len(sequence.token_ids) % self._block_size:
            self._state.plan.zero(table.block_ids[-1:])

    def _num_cached(self, sequence: Sequence, hits: list[BlockId]) -> int:
        """Prompt tokens among the hits, which go on into forced outputs."""
        return min(len(hits) * self._block_size, sequence.run.num_prompt)

    def _note_first_admission(self, sequence: Sequence, hits: list[BlockId]) -> bool:
        """Keep a request's prefix hits; False for what was admitted before (a preempted one)."""
        run = sequence.run
        if run.cached_tokens is not None:
            return False
        run.cached_tokens = self._num_cached(sequence, hits)
        return True

    def _num_fresh(self, sequence: Sequence, hits: list[BlockId]) -> int:
        return -(-len(sequence.token_ids) // self._block_size) - len(hits)

    def _has_seats(self, sequence: Sequence) -> bool:
        taken = self._state.batch.num_seats + self._state.receiving.num_seats
        return not taken or taken + self._num_seats(sequence) <= self._state.settings.max_slots

    def _num_seats(self, sequence: Sequence) -> int:
        is_receive = sequence.run.mode is Mode.RECEIVE
        return len(sequence.run.live) if is_receive else sequence.num_seats

    def _fits(self, sequence: Sequence, hits: list[BlockId], num_fresh: int) -> bool:
        """Whether its blocks are there now, and the peak to come is within the pool.

        A sequence that would be alone needs no forecast: preemption is its safety net.
        """
        state = self._state
        num_idle = state.memory.num_idle(hits)
        if num_fresh + num_idle > state.memory.num_available:
            return False
        others = [*state.batch, *state.receiving]
        if not others:
            return True
        growths = [g for other in others for g in self._growths(other, other.blocks.num_exclusive)]
        exclusive = sum(other.blocks.num_exclusive for other in others)
        in_use = state.settings.num_blocks - state.memory.num_available
        growths.extend(self._growths(sequence, num_fresh))
        elsewhere = (in_use - exclusive + num_idle) * self._block_size
        capacity = state.settings.num_blocks * self._block_size
        return elsewhere + peak_tokens(growths) <= capacity

    def _growths(self, sequence: Sequence, num_exclusive: int) -> Iterable[Growth]:
        """Forecast each sample that a sequence is or will fork into; the first has its blocks."""
        run, history = sequence.run, self._state.history
        used = num_exclusive * self._block_size
        if run.mode is Mode.PREFILL:
            return [Growth(used, 0)]
        sampling = run.request.sampling
        if self._num_seats(sequence) == 1 and sequence.num_first_tokens == 1:
            generated = [(0, sequence.num_outputs)]
        else:
            lengths = (len(run.outputs_of(i)) for i in run.live)
            generated = [(length - sequence.num_outputs, length) for length in lengths]
        growths: list[Growth] = []
        for forced, length in generated:
            remaining = forced + history.remaining(length, sampling.max_tokens)
            growths.append(Growth(0 if growths else used, remaining))
        return growths
