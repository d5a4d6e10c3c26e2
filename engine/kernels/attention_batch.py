"""Where the rows of one step stand: computed once a step, read by every layer.

Rows that decode (one query token, or a draft's few) come first and are computed together, in groups
of similar context so that padding stays small; then come the chunks, each on its own.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DecodeGroup(NamedTuple):
    """Neighbouring rows whose gathered contexts are padded to one length.

    Attributes:
        first, last: rows [first, last) of the step.
        tiles: int64 [rows * kv_heads * 2 * blocks], for `PagedKv.gather`. Rows with fewer blocks
            repeat their own last one, so that no other sequence's (or a free) block is ever read.
        bias: [rows, 1, 1, blocks * block_size], 0 for visible positions and -inf for others.
        window_bias: the same for layers with a sliding window; None where the model has none.
    """

    first: int
    last: int
    num_blocks: int
    tiles: Tensor
    bias: Tensor
    window_bias: Tensor | None


class Chunk(NamedTuple):
    """Rows [first, last) of one sequence at positions [start, start + last - first).

    Attributes:
        tiles: int64 [kv_heads * 2 * blocks] covering all positions up to the chunk's end.
    """

    first: int
    last: int
    start: int
    num_blocks: int
    tiles: Tensor


class AttentionBatch(NamedTuple):
    """One step's rows.

    Attributes:
        cos, sin: float32 [tokens, 1, head_dim]; sin is negative in its first half (see `rope`).
        write_rows: int64 [tokens * kv_heads * 2], for `PagedKv.write`.
    """

    cos: Tensor
    sin: Tensor
    write_rows: Tensor
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
