"""Merging moves the same bytes, in the fewest descriptors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.ids import BlockId
from kv_transfer.descriptors import merge_neighbours, paired_spans
from kv_transfer.transport import Span

BLOCK_BYTES = 3
POOL_BLOCKS = 24


@st.composite
def block_pairs(draw: st.DrawFn) -> tuple[list[BlockId], list[BlockId]]:
    """Distinct sources and distinct targets, with runs in both directions likely."""
    number = draw(st.integers(0, POOL_BLOCKS))
    orders = st.permutations(range(POOL_BLOCKS)) | st.sampled_from(
        [list(range(POOL_BLOCKS)), list(reversed(range(POOL_BLOCKS)))]
    )
    return (
        [BlockId(block) for block in draw(orders)[:number]],
        [BlockId(block) for block in draw(orders)[:number]],
    )


def bytes_moved(local: list[Span], target: list[Span]) -> dict[int, int]:
    """Return source offset by target offset, byte for byte."""
    moved: dict[int, int] = {}
    for here, there in zip(local, target, strict=True):
        assert here.num_bytes == there.num_bytes
        for index in range(here.num_bytes):
            assert there.offset + index not in moved, "a target byte is written twice"
            moved[there.offset + index] = here.offset + index
    return moved


@given(block_pairs())
def test_the_same_bytes_move(pairs: tuple[list[BlockId], list[BlockId]]) -> None:
    sources, targets = pairs
    wanted = {
        target * BLOCK_BYTES + index: source * BLOCK_BYTES + index
        for source, target in zip(sources, targets, strict=True)
        for index in range(BLOCK_BYTES)
    }
    assert bytes_moved(*paired_spans(sources, targets, BLOCK_BYTES)) == wanted


@given(block_pairs())
def test_no_two_descriptors_could_be_one(pairs: tuple[list[BlockId], list[BlockId]]) -> None:
    local, target = paired_spans(*pairs, BLOCK_BYTES)
    ends = {
        (h.offset + h.num_bytes, t.offset + t.num_bytes) for h, t in zip(local, target, strict=True)
    }
    starts = {(h.offset, t.offset) for h, t in zip(local, target, strict=True)}
    assert not ends & starts
    assert merge_neighbours(local, target) == (local, target)
