"""Blocks to spans: what one write moves, in as few descriptors as its blocks allow.

A descriptor costs 3 to 13 us whatever its size, so neighbours on both sides become one. That is
why pools allocate runs of neighbouring ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.ids import BlockId
from kv_transfer.transport import Span

SpanPairs = tuple[list[Span], list[Span]]
"""Local and remote spans of one write or read: of equal number, pairwise of equal size."""


def spans_of(blocks: Sequence[BlockId], block_bytes: int) -> list[Span]:
    """Return where blocks lie in a region, one span a block, in their order."""
    return [Span(block * block_bytes, block_bytes) for block in blocks]


def paired_spans(
    local: Sequence[BlockId], remote: Sequence[BlockId], block_bytes: int
) -> SpanPairs:
    """Return the spans that move block `local[i]` here to, or from, block `remote[i]` there.

    Args:
        local, remote: ids, one a block, of equal number; no target twice.
        block_bytes: distance between neighbouring blocks, equal on both sides.

    Raises:
        ValueError: the numbers of blocks differ.
    """
    _require_equal("blocks", len(local), len(remote))
    return merge_neighbours(spans_of(local, block_bytes), spans_of(remote, block_bytes))


def merge_neighbours(local: Sequence[Span], remote: Sequence[Span]) -> SpanPairs:
    """Return the fewest span pairs that move the same bytes, in the order of local offsets.

    Within one write or read the order is free: it has one end, after all of them.

    Raises:
        ValueError: the numbers of spans, or the sizes within a pair, differ.
    """
    _require_equal("spans", len(local), len(remote))
    merged_local: list[Span] = []
    merged_remote: list[Span] = []
    for here, there in sorted(zip(local, remote, strict=True), key=_local_offset):
        _require_equal("bytes in a pair of spans", here.num_bytes, there.num_bytes)
        if merged_local and _touch(merged_local[-1], here) and _touch(merged_remote[-1], there):
            merged_local[-1] = _join(merged_local[-1], here)
            merged_remote[-1] = _join(merged_remote[-1], there)
        else:
            merged_local.append(here)
            merged_remote.append(there)
    return merged_local, merged_remote


def check_spans(
    local: Sequence[Span], local_bytes: int, remote: Sequence[Span], remote_bytes: int
) -> None:
    """Check that there are spans, pairwise equal and within regions of so many bytes.

    Raises:
        ValueError: names what differs, or the side, the span and the region's size.
    """
    _require_equal("spans", len(local), len(remote))
    if not local:
        msg = "spans: none"
        raise ValueError(msg)
    for here, there in zip(local, remote, strict=True):
        _require_equal("bytes in a pair of spans", here.num_bytes, there.num_bytes)
    _check_bounds(local, local_bytes, "local")
    _check_bounds(remote, remote_bytes, "remote")


def _check_bounds(spans: Sequence[Span], num_bytes: int, side: str) -> None:
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


def _require_equal(what: str, local: int, remote: int) -> None:
    if local != remote:
        msg = f"{what}: {local} local, {remote} remote"
        raise ValueError(msg)
