"""What the scheduler counts; counters only grow."""

from __future__ import annotations

from bisect import bisect_left

ITERATION_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""vLLM's buckets of `vllm:iteration_tokens_total`."""


class Counters:
    """Plain numbers, read by `Scheduler.stats`."""

    def __init__(self) -> None:
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.prompt_tokens_computed = 0
        self.prompt_tokens_cached = 0
        self.prompt_tokens_received = 0
        self.peer_tokens_computed = 0
        self.peer_tokens_cached = 0
        self.generated_tokens = 0
        self.steps = 0
        self.block_copies = 0
        self.iteration_tokens = [0] * (len(ITERATION_TOKENS_BOUNDS) + 1)
        self.iteration_tokens_sum = 0

    def step(self, num_tokens: int, num_copies: int) -> None:
        """Count one step of so many query tokens and block copies."""
        self.steps += 1
        self.block_copies += num_copies
        self.iteration_tokens[bisect_left(ITERATION_TOKENS_BOUNDS, num_tokens)] += 1
        self.iteration_tokens_sum += num_tokens
