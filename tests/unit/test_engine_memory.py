"""Block pool, radix cache and tables: what single cases show best."""

from __future__ import annotations

import pytest

from core.block_hash import BlockHash, hash_blocks, namespace_of
from core.ids import BlockId
from engine.memory.block_pool import BlockPool, BlockStateError
from engine.memory.block_table import BlockTable
from engine.memory.free_runs import FreeRuns
from engine.memory.kv_memory import KvMemory


def fill(memory: KvMemory, tokens: list[int], namespace: bytes = b"") -> list[BlockId]:
    hashes = hash_blocks(tokens, block_size=4, fingerprint=b"m", namespace=namespace)
    block_ids = memory.allocate(len(hashes))
    memory.release(hashes, block_ids)
    return block_ids


def table_of(block_ids: list[BlockId]) -> BlockTable:
    table = BlockTable(4)
    table.append(block_ids)
    return table


def test_blocks_come_in_runs_and_single_ones_from_the_smallest_gap() -> None:
    pool = BlockPool(16)
    first = pool.allocate(6)
    assert first == list(range(6))
    pool.release([BlockId(2)], ())
    assert pool.allocate(4) == [6, 7, 8, 9]
    assert pool.allocate(1) == [2]


def test_scattered_blocks_are_given_when_no_run_is_long_enough() -> None:
    free = FreeRuns(0)
    free.put([BlockId(i) for i in (1, 2, 3, 5, 9, 8)])
    assert free.take(5) == [1, 2, 3, 8, 9]
    assert list(free) == [5]


def test_a_transition_that_the_diagram_lacks_names_the_block() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.reserve(1)
    with pytest.raises(BlockStateError, match="hold: block 0 is RESERVED"):
        pool.hold([block_id])
    with pytest.raises(BlockStateError, match="CACHED -> FREE: block 0 is RESERVED"):
        pool.evict([block_id])
    with pytest.raises(BlockStateError, match="2 blocks wanted, 1 are free"):
        pool.allocate(2)


def test_eviction_is_leaf_first_and_least_recently_used() -> None:
    memory = KvMemory(6, 4, b"m")
    old = fill(memory, [1, 2, 3, 4, 5, 6, 7, 8])
    young = fill(memory, [9, 9, 9, 9, 8, 8, 8, 8])
    assert memory.cache.evict(1) == [old[1]]
    memory.pool.evict([old[1]])
    memory.hold([old[0]])
    memory.release((), [old[0]])  # used again: now the youngest
    assert memory.cache.evict(3) == [young[1], young[0], old[0]]


def test_namespaces_do_not_share() -> None:
    memory = KvMemory(8, 4, b"m")
    fill(memory, [1, 2, 3, 4], namespace_of(tenant="a"))
    for namespace, num_hits in ((namespace_of(tenant="a"), 1), (namespace_of(tenant="b"), 0)):
        hashes = hash_blocks([1, 2, 3, 4], block_size=4, fingerprint=b"m", namespace=namespace)
        assert len(memory.match(hashes, 5)) == num_hits


def test_a_prompt_of_whole_blocks_reuses_all_but_the_last() -> None:
    memory = KvMemory(8, 4, b"m")
    fill(memory, [1, 2, 3, 4, 5, 6, 7, 8])
    hashes = hash_blocks([1, 2, 3, 4, 5, 6, 7, 8], block_size=4, fingerprint=b"m")
    assert len(memory.match(hashes, 8)) == 1
    assert len(memory.match(hashes, 9)) == 2


def test_touching_one_prompt_for_ever_keeps_the_eviction_queue_small() -> None:
    memory = KvMemory(8, 4, b"m")
    (block_id,) = fill(memory, [1, 2, 3, 4])
    for _ in range(1000):
        memory.hold([block_id])
        memory.release((), [block_id])
    assert len(memory.cache._leaves) < 100
    memory.check_invariants()


def test_only_the_tail_is_cloned_and_the_last_sharer_writes_in_place() -> None:
    pool = BlockPool(8)
    table = BlockTable(4)
    table.append(pool.allocate(2))
    sibling = table.fork()
    pool.hold(sibling.block_ids)
    assert table.writable_tail(6, pool) == 1
    assert table.writable_tail(8, pool) is None  # a block that is not there yet
    pool.release([sibling.replace(1, pool.allocate(1)[0])], ())
    assert table.writable_tail(6, pool) is None
    assert sibling.writable_tail(6, pool) is None
    assert (sibling.num_shared, sibling.num_exclusive) == (1, 1)


def test_blocks_below_another_holders_prefix_become_matchable_when_their_holder_goes() -> None:
    memory = KvMemory(6, 4, b"m")
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    hashes = hash_blocks(tokens, block_size=4, fingerprint=b"m")
    first, second = memory.allocate(1), memory.allocate(2)
    memory.publish(hashes[:1], table_of(first))
    memory.publish(hashes, table_of(second))  # the same prompt, computed at the same time
    assert memory.match(hashes, 9) == first
    memory.release(hashes[:1], first)
    memory.check_invariants()
    assert len(memory.allocate(memory.num_available)) == 4  # `first` is not kept by a child
    memory.release(hashes, second)
    assert memory.match(hashes, 9) == second
    memory.check_invariants()


def test_publishing_chunk_by_chunk_looks_at_each_block_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = KvMemory(64, 4, b"m")
    hashes = hash_blocks(list(range(256)), block_size=4, fingerprint=b"m")
    table = table_of(memory.allocate(64))
    looked_up: list[BlockHash] = []
    block_of = memory.cache.block_of

    def counted(block_hash: BlockHash) -> BlockId | None:
        looked_up.append(block_hash)
        return block_of(block_hash)

    monkeypatch.setattr(memory.cache, "block_of", counted)
    for num_full in range(8, 65, 8):
        memory.publish(hashes[:num_full], table)
    assert looked_up == hashes
    forked = table.fork()
    memory.hold(forked.block_ids)
    memory.publish(hashes, forked)
    assert looked_up == hashes
    assert memory.match(hashes, 257) == table.block_ids
    memory.check_invariants()


def test_publishing_goes_on_once_another_holders_block_is_gone() -> None:
    memory = KvMemory(4, 4, b"m")
    hashes = hash_blocks([1, 2, 3, 4, 5, 6, 7, 8], block_size=4, fingerprint=b"m")
    other, table = memory.allocate(1), table_of(memory.allocate(2))
    memory.publish(hashes[:1], table_of(other))
    memory.publish(hashes[:1], table)
    assert table.num_published == 0
    memory.release(hashes[:1], other)
    memory.allocate(memory.num_available)  # evicts it
    memory.publish(hashes, table)
    assert memory.match(hashes, 9) == table.block_ids
    memory.check_invariants()


def test_a_prefix_is_known_to_be_here_by_its_last_block() -> None:
    memory = KvMemory(8, 4, b"m")
    fill(memory, [1, 2, 3, 4, 5, 6, 7, 8])
    hashes = hash_blocks(list(range(1, 13)), block_size=4, fingerprint=b"m")
    assert [memory.holds_prefix(hashes, count) for count in range(4)] == [False, True, True, False]


def test_a_shared_block_is_not_put_below_a_prefix_that_its_holders_do_not_hold() -> None:
    memory = KvMemory(6, 4, b"m")
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    hashes = hash_blocks(tokens, block_size=4, fingerprint=b"m")
    first = memory.allocate(1)
    shared = memory.allocate(2)
    memory.hold(shared)
    memory.release(hashes[:1], first)
    memory.release(hashes, shared)
    assert memory.match(hashes, 9) == first
    memory.release(hashes, shared)
    assert memory.match(hashes, 9) == [first[0], shared[1]]
    memory.check_invariants()
