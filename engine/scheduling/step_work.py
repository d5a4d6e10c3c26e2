"""Fills a step: every running sequence's token first, then prompt chunks within the budget."""

from __future__ import annotations

from engine.executor.interface import SlotWork
from engine.scheduling.block_supply import BlockSupply
from engine.scheduling.chunking import chunk_length
from engine.scheduling.sequence import Sequence
from engine.scheduling.settings import Drafter
from engine.scheduling.state import SchedulerState


class StepWork:
    """Work items of running sequences."""

    def __init__(self, state: SchedulerState, supply: BlockSupply, drafter: Drafter | None) -> None:
        self._state = state
        self._supply = supply
        self._drafter = drafter

    def decode(self) -> list[Sequence] | None:
        """Give every decoding sequence with a slot its token.

        Returns:
            who has a chunk to come; None where one lacks blocks, and the step must carry no chunk.
        """
        demand = self._supply.make_room()
        batch, all_fed = self._state.batch, True
        for sequence, end in demand.decoding:
            if not batch.has_seat_for(sequence):
                continue
            if end is None or self._supply.secure(sequence, end):
                self._decode(sequence)
            else:
                all_fed = False
        return demand.catching_up if all_fed else None

    def chunks(self, sequences: list[Sequence], budget: int) -> int | None:
        """Give sequences that catch up chunks, in order of service, none overtaking another.

        Returns:
            what is left of the budget; None: one lacks blocks, nobody may be admitted.
        """
        for sequence in sequences:
            if not self._state.batch.has_seat_for(sequence):
                continue
            num_query = self.chunk_of(sequence, budget)
            if not num_query:
                return 0
            if not self._supply.secure(sequence, len(sequence.token_ids)):
                return None
            budget -= self.chunk(sequence, num_query)
        return budget

    def chunk_of(self, sequence: Sequence, budget: int) -> int:
        """Return the query tokens of a sequence's next chunk; 0 where the budget is too small."""
        block_size = self._state.settings.block_size
        return chunk_length(sequence.num_scheduled, sequence.num_behind, budget, block_size)

    def chunk(self, sequence: Sequence, num_query: int) -> int:
        """Add the chunk of a sequence that has its blocks; returns its query tokens."""
        is_last = num_query == sequence.num_behind
        num_samples = sequence.num_first_tokens if is_last else 0
        slot = self._state.batch.seat(sequence)
        self._state.plan.work(sequence, SlotWork(slot, num_query, num_samples))
        return num_query

    def _decode(self, sequence: Sequence) -> None:
        drafts: tuple[int, ...] = ()
        if self._drafter is not None and (count := self._supply.num_drafts(sequence)):
            drafts = tuple(self._drafter.propose(sequence, count))[:count]
        slot = self._state.batch.seat(sequence)
        self._state.plan.work(sequence, SlotWork(slot, 1 + len(drafts), 1, drafts))
