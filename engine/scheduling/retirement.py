"""When blocks of sequences that left can be used again.

A step in flight may still write a block of a sequence that has left, zero it, or copy from it.
So what is let go waits until every step submitted before has been applied.
"""

from __future__ import annotations

from collections import deque

from engine.memory.kv_memory import KvMemory
from engine.scheduling.sequence import Phase, Sequence
from engine.scheduling.waiting_queue import WaitingQueue


class Retirement:
    """Releases tables in order, and queues preempted sequences again once theirs is released."""

    def __init__(self, memory: KvMemory, waiting: WaitingQueue) -> None:
        self._memory = memory
        self._waiting = waiting
        self._last_submitted = -1
        self._last_applied = -1
        self._leaving: deque[tuple[int, Sequence, int]] = deque()
        self.num_coming = 0
        """Blocks that will be available once the steps in flight are applied."""

    @property
    def leaving(self) -> list[Sequence]:
        """Sequences whose blocks are not released yet."""
        return [sequence for _, sequence, _ in self._leaving]

    def submitted(self, number: int) -> None:
        """A step is in flight."""
        self._last_submitted = number

    def applied(self, number: int) -> None:
        """A step's results were applied: release what waited for it."""
        self._last_applied = number
        while self._leaving and self._leaving[0][0] <= number:
            _, sequence, num_blocks = self._leaving.popleft()
            self.num_coming -= num_blocks
            self._release(sequence)

    def wait_for(self, number: int) -> None:
        """A plan in the making copies a block that leaving sequences may hold as well: what is let
        go stays until that plan is applied."""
        self._leaving = deque((number, sequence, blocks) for _, sequence, blocks in self._leaving)

    def let_go(self, sequence: Sequence) -> None:
        """Release a sequence's blocks as soon as no step in flight can touch them."""
        if self._last_applied == self._last_submitted:
            self._release(sequence)
            return
        pool = self._memory.pool
        num_blocks = sum(pool.num_holders(block_id) == 1 for block_id in sequence.block_ids)
        self.num_coming += num_blocks
        self._leaving.append((self._last_submitted, sequence, num_blocks))

    def _release(self, sequence: Sequence) -> None:
        memory = self._memory
        num_full = sequence.num_computed // memory.block_size
        known = sequence.token_ids[: num_full * memory.block_size]
        memory.extend_hashes(sequence.hashes, known, sequence.run.request.namespace)
        memory.release(sequence.hashes[:num_full], sequence.block_ids)
        sequence.table = None
        if sequence.phase is Phase.PREEMPTED:
            sequence.phase = Phase.WAITING
            sequence.num_computed = 0
            self._waiting.push(sequence, at_front=True)
