"""The scheduler's own section of the configuration, and the seam for speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.scheduling.sequence import Sequence as RunningSequence


class SchedulerSettings(msgspec.Struct, frozen=True):
    """Limits of one replica.

    Attributes:
        num_blocks: blocks of the pool.
        block_size: positions a block.
        chunk_tokens: prompt tokens a step, at least one block.
        max_slots: sequences in one step.
        max_waiting: requests without blocks beyond which new ones are refused.
        max_model_len: tokens of prompt and output together.
        max_receiving_share: share of the pool that may wait for peers' writes (or one request).
        vocab_size: token ids are below it; None where nothing depends on it.
    """

    num_blocks: int
    block_size: int
    chunk_tokens: int
    max_slots: int
    max_waiting: int
    max_model_len: int
    max_receiving_share: float = 0.3
    vocab_size: int | None = None


class Drafter(Protocol):
    """Proposes tokens that a step verifies; the executor accepts those that it would have sampled.

    A wrong draft costs arithmetic, never a token.
    """

    @property
    def max_drafts(self) -> int:
        """Most drafts a step and sequence; blocks are allocated for all of them."""
        ...

    def propose(self, sequence: RunningSequence, count: int) -> Sequence[int]:
        """Return at most `count` tokens to follow the sequence's last token; steps that are
        pending may add tokens before them."""
        ...
