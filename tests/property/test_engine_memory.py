"""Block pool, free runs, radix cache and tables in random order, each against a plain model."""

from __future__ import annotations

import contextlib
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.block_hash import BlockHash
from core.ids import BlockId
from engine.memory.block_pool import BlockPool, BlockState, BlockStateError
from engine.memory.block_table import BlockTable
from engine.memory.free_runs import FreeRuns, runs_of
from engine.memory.kv_memory import KvMemory

SETTINGS = settings(max_examples=40, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60), st.randoms())
@settings(max_examples=60, deadline=None)
def test_free_runs_are_a_set_that_gives_runs(
    operations: list[tuple[bool, int]], rng: Random
) -> None:
    free, taken = FreeRuns(64), list[BlockId]()
    for takes, count in operations:
        if takes and count <= len(free):
            longest = max((end - start for start, end in runs_of(free)), default=0)
            got = free.take(count)
            assert len(set(got)) == count
            assert len(list(runs_of(got))) == 1 or longest < count
            assert set(got).isdisjoint(taken)
            taken += got
        elif not takes:
            rng.shuffle(taken)
            back, taken = taken[:count], taken[count:]
            free.put(back)
        assert sorted([*free, *taken]) == list(range(64))
        assert len(free) + len(taken) == 64
        for _, end in runs_of(free):
            assert end not in set(free)


class PoolMachine(RuleBasedStateMachine):
    """Every transition on random blocks: the diagram's happen, all others are refused."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.model = [(BlockState.FREE, 0)] * num_blocks
        self.matchable: set[BlockId] = set()

    @rule(count=st.integers(0, 5), reserves=st.booleans())
    def take(self, count: int, reserves: bool) -> None:
        take = self.pool.reserve if reserves else self.pool.allocate
        num_free = sum(state is BlockState.FREE for state, _ in self.model)
        with contextlib.ExitStack() as stack:
            if count > num_free:
                stack.enter_context(refused())
            for block_id in take(count):
                assert self.model[block_id][0] is BlockState.FREE
                self.model[block_id] = (
                    (BlockState.RESERVED, 0) if reserves else (BlockState.OWNED, 1)
                )

    @rule(
        data=st.data(),
        move=st.sampled_from(["adopt", "cancel", "quarantine", "end_quarantine", "evict", "hold"]),
    )
    def move(self, data: st.DataObject, move: str) -> None:
        block_id = BlockId(data.draw(st.integers(0, len(self.model) - 1)))
        state, holders = self.model[block_id]
        diagram = {
            "adopt": {BlockState.RESERVED: (BlockState.OWNED, 1)},
            "cancel": {BlockState.RESERVED: (BlockState.FREE, 0)},
            "quarantine": {BlockState.RESERVED: (BlockState.QUARANTINED, 0)},
            "end_quarantine": {BlockState.QUARANTINED: (BlockState.FREE, 0)},
            "evict": {BlockState.CACHED: (BlockState.FREE, 0)},
            "hold": {
                BlockState.CACHED: (BlockState.OWNED, 1),
                BlockState.OWNED: (BlockState.OWNED, holders + 1),
            },
        }[move]
        method = getattr(self.pool, move)
        if state in diagram:
            method([block_id])
            self.model[block_id] = diagram[state]
        else:
            with refused():
                method([block_id])

    @rule(data=st.data(), is_matchable=st.booleans())
    def release(self, data: st.DataObject, is_matchable: bool) -> None:
        block_id = BlockId(data.draw(st.integers(0, len(self.model) - 1)))
        state, holders = self.model[block_id]
        matchable = {block_id} if is_matchable else set[BlockId]()
        if state is not BlockState.OWNED:
            with refused():
                self.pool.release([block_id], matchable)
            return
        cached = self.pool.release([block_id], matchable)
        last = BlockState.CACHED if is_matchable else BlockState.FREE
        self.model[block_id] = (BlockState.OWNED, holders - 1) if holders > 1 else (last, 0)
        assert cached == ([block_id] if holders == 1 and is_matchable else [])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        for index, (state, holders) in enumerate(self.model):
            assert self.pool.state(BlockId(index)) is state
            assert self.pool.num_holders(BlockId(index)) == holders
        counts, by_state = self.pool.counts(), Counter(state for state, _ in self.model)
        assert counts.total == len(self.model)
        assert counts.free == self.pool.num_free == by_state[BlockState.FREE]
        assert counts.cached == self.pool.num_cached == by_state[BlockState.CACHED]
        assert counts.owned == by_state[BlockState.OWNED]
        assert counts.reserved == by_state[BlockState.RESERVED]
        assert counts.quarantined == by_state[BlockState.QUARANTINED]


@contextlib.contextmanager
def refused():
    """Expect a BlockStateError."""
    try:
        yield
    except BlockStateError:
        return
    msg = "the transition was not refused"
    raise AssertionError(msg)


class Holder:
    """A sequence as the memory sees it: tokens, a table, hashes, published or not."""

    def __init__(self, tokens: list[int], table: BlockTable, hashes: list[BlockHash]) -> None:
        self.tokens = tokens
        self.table = table
        self.hashes = hashes


class MemoryMachine(RuleBasedStateMachine):
    """Sequences come with prefix hits, publish, fork, clone and go; what a block holds is known."""

    @initialize(num_blocks=st.integers(4, 20))
    def start(self, num_blocks: int) -> None:
        self.memory = KvMemory(num_blocks, 2, b"m")
        self.holders: list[Holder] = []
        self.content: dict[BlockId, tuple[int, ...]] = {}
        self.ledger: set[BlockHash] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), publishes=st.booleans())
    def come(self, tokens: list[int], publishes: bool) -> None:
        memory, hashes = self.memory, list[BlockHash]()
        memory.extend_hashes(hashes, tokens, b"")
        hits = memory.match(hashes, len(tokens))
        assert len(hits) <= (len(tokens) - 1) // 2
        for index, block_id in enumerate(hits):
            assert self.content[block_id] == tuple(tokens[: 2 * index + 2])
        table = BlockTable(2, hits)
        missing = table.num_missing(len(tokens))
        if missing + memory.num_idle(hits) > memory.num_available:
            return
        memory.hold(hits)
        table.append(memory.allocate(missing))
        for index in range(len(hits), len(table)):
            self.content[table.block_ids[index]] = tuple(tokens[: 2 * index + 2])
        holder = Holder(tokens, table, hashes)
        self.holders.append(holder)
        if publishes:
            self._publish(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.memory.extend_hashes(holder.hashes, holder.tokens, b"")
        self._publish(holder)

    def _publish(self, holder: Holder) -> None:
        memory, hashes, table = self.memory, holder.hashes, holder.table
        memory.publish(hashes, table)
        count = table.num_published
        own = table.block_ids[:count]
        assert [memory.cache.block_of(block_hash) for block_hash in hashes[:count]] == own
        # It stops only where another block holds the prefix.
        assert count == len(hashes) or memory.cache.block_of(hashes[count]) is not None

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.holders))
        child = Holder(list(parent.tokens), parent.table.fork(), list(parent.hashes))
        self.memory.hold(child.table.block_ids)
        assert child.table.num_exclusive == 0
        self.holders.append(child)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), token=st.integers(0, 1))
    def write(self, data: st.DataObject, token: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        memory, table, position = self.memory, holder.table, len(holder.tokens)
        shared = table.writable_tail(position, memory.pool)
        needed = table.num_missing(position + 1) + (shared is not None)
        if needed > memory.num_available:
            return
        if shared is not None:
            assert shared == len(table) - 1
            source = table.replace(shared, memory.allocate(1)[0])
            memory.release((), [source])
            assert table.num_exclusive >= 1
        table.append(memory.allocate(table.num_missing(position + 1)))
        tail = table.block_ids[-1]
        assert memory.pool.num_holders(tail) == 1
        holder.tokens.append(token)
        self.content[tail] = tuple(holder.tokens)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.memory.extend_hashes(holder.hashes, holder.tokens, b"")
        self.memory.release(holder.hashes, holder.table.block_ids)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.check_invariants()
        stored, evicted = self.memory.cache.drain_changes()
        assert not set(stored) & set(evicted)
        self.ledger |= set(stored)
        self.ledger -= set(evicted)
        assert len(self.ledger) == len(self.memory.cache)
        counts: Counter[BlockId] = Counter()
        for holder in self.holders:
            counts.update(holder.table.block_ids)
        for block_id, count in counts.items():
            assert self.memory.pool.num_holders(block_id) == count

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        while self.holders:
            holder = self.holders.pop()
            self.memory.release(holder.hashes, holder.table.block_ids)
        # Everything idle can be evicted: the tree never keeps a block back.
        total = self.memory.pool.num_blocks
        assert self.memory.num_available == total
        assert len(self.memory.allocate(total)) == total
        assert not len(self.memory.cache)


PoolMachine.TestCase.settings = SETTINGS
MemoryMachine.TestCase.settings = SETTINGS
TestPool = PoolMachine.TestCase
TestMemory = MemoryMachine.TestCase
