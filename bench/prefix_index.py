"""The router's prefix index: what a block weighs, and how long a long prompt takes to match.

The prompt is the worst kind: each of the workers holds another number of its leading blocks, so
that none of the searches ends early.
"""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator

from bench.figures import Figure, figure
from core.block_hash import BlockHash
from core.clock import SystemClock
from core.ids import Boot, WorkerId
from router.policy.prefix_index import PrefixIndex

NUM_WORKERS = 64
PROMPT_BLOCKS = 2000
SIZES = (44_000, 90_000)
"""Distinct blocks, just after the index's map has grown, and before it does again."""

SHARED = 0.2
"""Share of blocks that half of the workers hold, as of common system prompts."""
ROUNDS = 200
MEMORY_AIM_BYTES = 100
MATCH_AIM_US = 200

_BOOT = Boot("0" * 32)


def run() -> Iterator[Figure]:
    """Yield the weight of a block for each size, then the match."""
    for size in SIZES:
        yield figure(
            f"prefix_index.memory.{size}",
            [bytes_a_block(size)],
            "bytes a block",
            against=f"{NUM_WORKERS} workers, {SHARED:.0%} of the blocks at half of them",
            at_most=MEMORY_AIM_BYTES,
        )
    yield figure(
        f"prefix_index.match.{PROMPT_BLOCKS}",
        _match_us(),
        "us",
        against=f"{NUM_WORKERS} workers, each with another match",
        at_most=MATCH_AIM_US,
    )


def block(number: int) -> BlockHash:
    """Return a hash as a prompt's block has."""
    return BlockHash(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).digest())


def fill(index: PrefixIndex, num_blocks: int) -> None:
    """Give each worker its share of blocks, and half of them the shared ones."""
    num_shared = int(SHARED * num_blocks)
    own = (num_blocks - num_shared) // NUM_WORKERS
    for number in range(NUM_WORKERS):
        first = num_shared + number * own
        shared = range(num_shared if number % 2 else 0)
        for numbers in (shared, range(first, first + own)):
            index.apply_delta(WorkerId(f"w{number}"), _BOOT, map(block, numbers), ())


def bytes_a_block(num_blocks: int) -> float:
    """Return what so many distinct blocks weigh each, with all that the index keeps of workers."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = PrefixIndex()
        fill(index, num_blocks)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / len(index)


def _match_us() -> list[float]:
    index = PrefixIndex()
    prompt = [block(number) for number in range(PROMPT_BLOCKS)]
    step = PROMPT_BLOCKS // NUM_WORKERS
    for number in range(NUM_WORKERS):
        index.apply_snapshot(WorkerId(f"w{number}"), _BOOT, prompt[: step * (number + 1)])
    clock = SystemClock()
    samples: list[float] = []
    for _ in range(ROUNDS):
        began = clock.now()
        index.match(prompt)
        samples.append(1e6 * (clock.now() - began))
    return samples
