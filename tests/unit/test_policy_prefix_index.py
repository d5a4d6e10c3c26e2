"""The prefix index: what it answers, what it weighs, how long it takes."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import pytest

from bench.prefix_index import bytes_a_block
from core.block_hash import BlockHash
from core.ids import Boot, WorkerId
from router.policy.prefix_index import PrefixIndex

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
BOOT, NEXT_BOOT = Boot("1" * 32), Boot("2" * 32)


def block(number: int, family: str = "") -> BlockHash:
    return BlockHash(hashlib.blake2b(f"{family}{number}".encode(), digest_size=16).digest())


def blocks(count: int, family: str = "") -> list[BlockHash]:
    return [block(number, family) for number in range(count)]


def test_match_counts_the_leading_blocks_of_each_worker() -> None:
    index = PrefixIndex()
    index.apply_snapshot(A, BOOT, blocks(5))
    index.apply_snapshot(B, BOOT, blocks(2))
    index.apply_snapshot(C, BOOT, blocks(9, "other"))
    assert index.match(blocks(8)) == {A: 5, B: 2}
    assert index.match(blocks(3)) == {A: 3, B: 2}
    assert index.match(blocks(3, "nobody's")) == {}
    assert index.match([]) == {}


def test_deltas_add_and_remove_and_what_is_in_both_is_held() -> None:
    index = PrefixIndex()
    index.apply_delta(A, BOOT, blocks(3), [])
    index.apply_delta(A, BOOT, [block(3), block(2)], [block(2)])
    index.apply_delta(B, BOOT, blocks(4), [])
    index.apply_delta(A, BOOT, [block(0)], [block(3), block(77)])
    assert index.match(blocks(9)) == {A: 3, B: 4}
    assert (index.num_blocks(A), index.num_blocks(B), index.num_blocks(C)) == (3, 4, 0)
    index.apply_delta(B, BOOT, [], [block(3)])
    assert len(index) == 3


def test_another_boot_starts_from_nothing() -> None:
    index = PrefixIndex()
    index.apply_delta(A, BOOT, blocks(3), [])
    index.apply_delta(A, NEXT_BOOT, [block(0)], [])
    assert index.match(blocks(3)) == {A: 1}
    assert index.boot_of(A) == NEXT_BOOT


def test_forgotten_blocks_are_never_answered_and_are_swept() -> None:
    index = PrefixIndex()
    index.apply_snapshot(A, BOOT, blocks(100))
    index.apply_snapshot(B, BOOT, blocks(10))
    index.apply_snapshot(B, BOOT, blocks(20))  # the snapshot replaces: 10 retired, not swept yet
    assert index.match(blocks(100)) == {A: 100, B: 20}
    index.forget(A)
    index.forget(A)
    assert index.match(blocks(100)) == {B: 20}
    assert len(index) == 20
    index.forget(B)
    assert len(index) == 0
    index.apply_delta(C, BOOT, blocks(1), [])
    assert index.match(blocks(100)) == {C: 1}


def test_a_bit_is_not_given_to_another_worker_before_it_was_swept() -> None:
    index = PrefixIndex()
    index.apply_snapshot(A, BOOT, blocks(100))
    index.apply_snapshot(B, BOOT, blocks(10))
    index.forget(B)  # 10 of 100: stays in the map
    index.apply_delta(C, BOOT, [], [])
    assert index.match(blocks(100)) == {A: 100}


def test_masks_of_many_workers_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.policy.prefix_index._MAX_SHARED_MASKS", 4)
    index = PrefixIndex()
    for number in range(20):
        index.apply_snapshot(WorkerId(f"w{number}"), BOOT, blocks(number + 1))
    expected = {WorkerId(f"w{number}"): number + 1 for number in range(20)}
    assert index.match(blocks(20)) == expected


@pytest.mark.parametrize("count", [44_000, 90_000])
def test_a_block_weighs_at_most_100_bytes(count: int) -> None:
    """44,000 and 90,000 lie just after a doubling of the dict and in the middle."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = PrefixIndex()
        index.apply_snapshot(A, BOOT, (block(number) for number in range(count)))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(index) <= 100


def test_nor_does_it_where_many_workers_hold_many_of_the_same() -> None:
    assert bytes_a_block(11_000) <= 100  # just after its map has grown


class CountingPrompt(list[BlockHash]):
    """Counts how many of its blocks were looked up."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


def test_a_long_prompt_needs_few_look_ups() -> None:
    """2,000 blocks and 64 workers are to take at most 200 us; each look-up takes about 0.4."""
    index = PrefixIndex()
    prompt = CountingPrompt(blocks(2000))
    for number in range(64):
        index.apply_snapshot(WorkerId(f"w{number}"), BOOT, blocks(31 * number + 1))
    assert index.match(prompt)[WorkerId("w63")] == 31 * 63 + 1
    assert prompt.num_read < 500
    prompt.num_read = 0
    for number in range(64):
        index.apply_snapshot(WorkerId(f"w{number}"), BOOT, blocks(1000))
    assert set(index.match(prompt).values()) == {1000}
    assert prompt.num_read < 12
