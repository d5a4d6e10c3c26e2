"""Blocks that wait for a peer's writes, and blocks in which a write may still land.

Reserved blocks are in no table that anyone else sees. An attempt that ends with writes possibly
under way leaves its blocks here, quarantined under its handoff's name; a retry gets fresh ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.ids import BlockId, HandoffId
from engine.memory.block_table import BlockTable
from engine.memory.kv_memory import KvMemory
from engine.scheduling.sequence import Phase, Sequence


class Receiving:
    """Reservations by handoff, bounded by a share of the pool (or one request)."""

    def __init__(self, memory: KvMemory, max_share: float) -> None:
        self._memory = memory
        self._max_reserved = int(max_share * memory.pool.num_blocks)
        self._sequence_by_handoff: dict[HandoffId, Sequence] = {}
        self._quarantine_by_handoff: dict[HandoffId, list[BlockId]] = {}
        self._num_reserved = 0

    def __len__(self) -> int:
        """Return the number of reservations."""
        return len(self._sequence_by_handoff)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences that wait for writes."""
        return iter(self._sequence_by_handoff.values())

    def __contains__(self, handoff: HandoffId) -> bool:
        """Whether an attempt has a reservation."""
        return handoff in self._sequence_by_handoff

    def is_quarantined(self, handoff: HandoffId) -> bool:
        """Whether writes of an attempt may still land in blocks that are kept for it."""
        return handoff in self._quarantine_by_handoff

    def writable(self, handoff: HandoffId) -> list[BlockId]:
        """Return the blocks that writes of this attempt may land in: reserved or quarantined."""
        sequence = self._sequence_by_handoff.get(handoff)
        if sequence is not None:
            return sequence.block_ids[sequence.blocks.num_shared :]
        return self._quarantine_by_handoff.get(handoff, [])

    @property
    def num_seats(self) -> int:
        """Slots that the sequences will need when they join."""
        return sum(len(sequence.run.live) for sequence in self)

    def has_room(self, count: int) -> bool:
        """Whether `count` more blocks may be reserved."""
        return not len(self) or self._num_reserved + count <= self._max_reserved

    def reserve(self, handoff: HandoffId, sequence: Sequence, hits: list[BlockId]) -> None:
        """Hold the cached blocks and reserve the rest of the prompt's, for a new attempt."""
        assert handoff not in self
        assert not self.is_quarantined(handoff)
        memory = self._memory
        memory.hold(hits)
        table = BlockTable(memory.block_size, hits)
        fresh = memory.reserve(table.num_missing(len(sequence.token_ids)))
        table.append(fresh)
        sequence.table = table
        sequence.phase = Phase.RECEIVING
        self._num_reserved += len(fresh)
        self._sequence_by_handoff[handoff] = sequence

    def arrived(self, handoff: HandoffId) -> Sequence:
        """All writes are in: the blocks become the sequence's own.

        Raises:
            KeyError: no such reservation.
        """
        sequence, fresh = self._pop(handoff)
        self._memory.pool.adopt(fresh)
        sequence.num_computed = len(sequence.token_ids)
        return sequence

    def end(self, handoff: HandoffId, *, quarantine: bool) -> None:
        """Give an attempt's blocks up; with `quarantine`, until `end_quarantine`."""
        sequence, fresh = self._pop(handoff)
        self._memory.release((), sequence.block_ids[: sequence.blocks.num_shared])
        sequence.table = None
        sequence.phase = Phase.ENDED
        if quarantine:
            self._memory.pool.quarantine(fresh)
            self._quarantine_by_handoff[handoff] = fresh
        else:
            self._memory.pool.cancel(fresh)

    def end_quarantine(self, handoff: HandoffId) -> int:
        """Free an attempt's quarantined blocks; returns how many (unknown attempts: 0)."""
        blocks = self._quarantine_by_handoff.pop(handoff, [])
        self._memory.pool.end_quarantine(blocks)
        return len(blocks)

    def check_invariants(self) -> None:
        """Assert that reserved and quarantined blocks are exactly those that are named here."""
        reserved = [s.block_ids[s.blocks.num_shared :] for s in self]
        counts = self._memory.pool.counts()
        assert sum(map(len, reserved)) == self._num_reserved == counts.reserved
        assert sum(map(len, self._quarantine_by_handoff.values())) == counts.quarantined

    def _pop(self, handoff: HandoffId) -> tuple[Sequence, list[BlockId]]:
        sequence = self._sequence_by_handoff.pop(handoff)
        fresh = sequence.block_ids[sequence.blocks.num_shared :]
        self._num_reserved -= len(fresh)
        return sequence, fresh
