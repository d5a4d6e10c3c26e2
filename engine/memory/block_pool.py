"""The states of one rank's blocks. Every transition is one method; anything else is refused.

               reserve            adopt                release (last holder)
        free ---------> reserved ------> owned(n) ---------------------------> cached
         ^ ^ ^            |  |            ^ | ^                                  |  |
         | | |   cancel   |  |  quarantine| | '---------------- hold -----------'  |
         | | '------------'  '--> quarantined                                      |
         | |    end_quarantine     |      | |                                      |
         | '-----------------------'      | |                       evict          |
         '--------------------------------|-|--------------------------------------'
         allocate: free -> owned(1) ------' '-- release (last holder, not matchable) -> free

A peer may write into a block only while it is reserved or quarantined.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Sequence

import msgspec

from core.ids import BlockId
from engine.memory.free_runs import FreeRuns


class BlockState(enum.IntEnum):
    """Where a block is in its life."""

    FREE = 0
    RESERVED = 1
    OWNED = 2
    CACHED = 3
    QUARANTINED = 4


class BlockStateError(Exception):
    """A transition that the diagram does not have: a programming error, never a client's."""


class PoolCounts(msgspec.Struct, frozen=True):
    """Blocks by state; they sum to `total`."""

    total: int
    free: int
    reserved: int
    owned: int
    cached: int
    quarantined: int


class BlockPool:
    """States and reference counts of `num_blocks` blocks, all free at first."""

    def __init__(self, num_blocks: int) -> None:
        self._state = [BlockState.FREE] * num_blocks
        self._num_holders = [0] * num_blocks
        self._free = FreeRuns(num_blocks)
        self._count_by_state = [0] * len(BlockState)
        self._count_by_state[BlockState.FREE] = num_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks in all states."""
        return len(self._state)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` and `reserve` can give."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and the radix cache can match."""
        return self._count_by_state[BlockState.CACHED]

    def state(self, block_id: BlockId) -> BlockState:
        """Return a block's state."""
        return self._state[block_id]

    def num_holders(self, block_id: BlockId) -> int:
        """Return the reference count: how many holders an owned block has; 0 for all others."""
        return self._num_holders[block_id]

    def allocate(self, count: int) -> list[BlockId]:
        """Free -> owned(1): give out blocks, a run of neighbours where there is one.

        Raises:
            BlockStateError: fewer than `count` blocks are free.
        """
        return self._take(count, BlockState.OWNED, num_holders=1)

    def reserve(self, count: int) -> list[BlockId]:
        """Free -> reserved: give out blocks for a peer to write.

        Raises:
            BlockStateError: fewer than `count` blocks are free.
        """
        return self._take(count, BlockState.RESERVED, num_holders=0)

    def adopt(self, block_ids: Sequence[BlockId]) -> None:
        """Reserved -> owned(1): the peer's writes are complete."""
        self._move(block_ids, BlockState.RESERVED, BlockState.OWNED)
        for block_id in block_ids:
            self._num_holders[block_id] = 1

    def cancel(self, block_ids: Sequence[BlockId]) -> None:
        """Reserved -> free: no write was or will be posted."""
        self._move(block_ids, BlockState.RESERVED, BlockState.FREE)

    def quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """Reserved -> quarantined: a write may still land."""
        self._move(block_ids, BlockState.RESERVED, BlockState.QUARANTINED)

    def end_quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """Quarantined -> free: the writer settled, was fenced, or its memory is gone."""
        self._move(block_ids, BlockState.QUARANTINED, BlockState.FREE)

    def hold(self, block_ids: Iterable[BlockId]) -> None:
        """Owned(n) -> owned(n + 1), cached -> owned(1): one more holder."""
        for block_id in block_ids:
            if self._state[block_id] is BlockState.CACHED:
                self._set(block_id, BlockState.OWNED)
            elif self._state[block_id] is not BlockState.OWNED:
                self._refuse(block_id, "hold")
            self._num_holders[block_id] += 1

    def release(self, block_ids: Iterable[BlockId], matchable: Container[BlockId]) -> list[BlockId]:
        """Owned(n) -> owned(n - 1); the last holder's become cached if `matchable`, else free.

        Returns:
            the blocks that became cached.
        """
        cached: list[BlockId] = []
        freed: list[BlockId] = []
        for block_id in block_ids:
            if self._state[block_id] is not BlockState.OWNED:
                self._refuse(block_id, "release")
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id]:
                continue
            is_matchable = block_id in matchable
            (cached if is_matchable else freed).append(block_id)
            self._set(block_id, BlockState.CACHED if is_matchable else BlockState.FREE)
        self._free.put(freed)
        return cached

    def evict(self, block_ids: Sequence[BlockId]) -> None:
        """Cached -> free: the radix cache forgot them."""
        self._move(block_ids, BlockState.CACHED, BlockState.FREE)

    def counts(self) -> PoolCounts:
        """Return the blocks by state."""
        by_state = self._count_by_state
        return PoolCounts(
            total=self.num_blocks,
            free=by_state[BlockState.FREE],
            reserved=by_state[BlockState.RESERVED],
            owned=by_state[BlockState.OWNED],
            cached=by_state[BlockState.CACHED],
            quarantined=by_state[BlockState.QUARANTINED],
        )

    def check_invariants(self) -> None:
        """Assert that states, counts, holders and free runs agree."""
        for state in BlockState:
            assert self._state.count(state) == self._count_by_state[state], state
        assert sum(self._count_by_state) == self.num_blocks
        for state, num_holders in zip(self._state, self._num_holders, strict=True):
            assert (num_holders > 0) == (state is BlockState.OWNED)
        free = list(self._free)
        assert len(free) == len(set(free)) == len(self._free)
        assert all(self._state[block_id] is BlockState.FREE for block_id in free)
        assert len(free) == self._count_by_state[BlockState.FREE]

    def _take(self, count: int, state: BlockState, *, num_holders: int) -> list[BlockId]:
        if count > len(self._free):
            msg = f"{count} blocks wanted, {len(self._free)} are free"
            raise BlockStateError(msg)
        taken = self._free.take(count)
        for block_id in taken:
            self._set(block_id, state)
            self._num_holders[block_id] = num_holders
        return taken

    def _move(self, block_ids: Sequence[BlockId], old: BlockState, new: BlockState) -> None:
        for block_id in block_ids:
            if self._state[block_id] is not old:
                self._refuse(block_id, f"{old.name} -> {new.name}")
            self._set(block_id, new)
        if new is BlockState.FREE:
            self._free.put(block_ids)

    def _set(self, block_id: BlockId, state: BlockState) -> None:
        self._count_by_state[self._state[block_id]] -= 1
        self._count_by_state[state] += 1
        self._state[block_id] = state

    def _refuse(self, block_id: BlockId, what: str) -> None:
        msg = f"{what}: block {block_id} is {self._state[block_id].name}"
        raise BlockStateError(msg)
