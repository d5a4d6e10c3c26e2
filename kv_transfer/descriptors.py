"""Blocks to spans: what one write moves, in as few descriptors as its blocks allow.

A descriptor costs 3 to 13 us whatever its size, so neighbours on both sides become one. That is
why pools allocate runs of neighbouring ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.ids import BlockId
from kv_transfer.transport import Span

SpanPairs = tuple[list[Span], list[Span]]
"""Local and target spans of one write: of equal number, pairwise of equal size."""


def paired_spans(
    sources: Sequence[BlockId], targets: Sequence[BlockId], block_bytes: int
) -> SpanPairs:
    """Return the spans that move block `sources[i]` here to block `targets[i]` there.

    Args:
        sources, targets: ids, one a block, of equal number; no target twice.
        block_bytes: distance between neighbouring blocks, equal on both sides.

    Raises:
        ValueError: the numbers of blocks differ.
    """
    _require_equal("blocks", len(sources), len(targets))
    return merge_neighbours(
        [Span(block * block_bytes, block_bytes) for block in sources],
        [Span(block * block_bytes, block_bytes) for block in targets],
    )


def merge_neighbours(local: Sequence[Span], target: Sequence[Span]) -> SpanPairs:
    """Return the fewest span pairs that move the same bytes, in the order of local offsets.

    Within one write the order is free: it has one notification, after all of them.

    Raises:
        ValueError: the numbers of spans, or the sizes within a pair, differ.
    """
    _require_equal("spans", len(local), len(target))
    merged_local: list[Span] = []
    merged_target: list[Span] = []
    for here, there in sorted(zip(local, target, strict=True), key=_local_offset):
        _require_equal("bytes in a pair of spans", here.num_bytes, there.num_bytes)
        if merged_local and _touch(merged_local[-1], here) and _touch(merged_target[-1], there):
            merged_local[-1] = _join(merged_local[-1], here)
            merged_target[-1] = _join(merged_target[-1], there)
        else:
            merged_local.append(here)
            merged_target.append(there)
    return merged_local, merged_target


def check_bounds(spans: Sequence[Span], num_bytes: int, side: str) -> None:
    """Check that every span lies within a region of `num_bytes`.

    Raises:
        ValueError: names the side ("local" or "target"), the span and the size.
    """
    for span in spans:
        if span.offset < 0 or span.num_bytes <= 0 or span.offset + span.num_bytes > num_bytes:
            msg = f"{side} {span} is not inside the region of {num_bytes} bytes"
            raise ValueError(msg)


def _local_offset(pair: tuple[Span, Span]) -> int:
    return pair[0].offset


def _touch(first: Span, second: Span) -> bool:
    return first.offset + first.num_bytes == second.offset


def _join(first: Span, second: Span) -> Span:
    return Span(first.offset, first.num_bytes + second.num_bytes)


def _require_equal(what: str, local: int, target: int) -> None:
    if local != target:
        msg = f"{what}: {local} local, {target} target"
        raise ValueError(msg)
