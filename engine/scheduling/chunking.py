"""How much of a prompt one step computes."""

from __future__ import annotations


def chunk_length(start: int, remaining: int, budget: int, block_size: int) -> int:
    """Return the query tokens of a chunk: all that remains, or up to a block border.

    Chunks that are not the last end on block borders, so that finished blocks are whole and can be
    pushed, cached and shared at once.

    Args:
        start: first position to compute.
        remaining: known tokens from there on, at least 1.
        budget: prompt tokens that the step can still take.

    Returns:
        0 where the budget does not reach the next border.
    """
    if remaining <= budget:
        return remaining
    border = (start + budget) // block_size * block_size
    return max(0, border - start)
