"""Blocks become few spans."""

from __future__ import annotations

import pytest

from core.ids import BlockId
from kv_transfer.descriptors import check_spans, merge_neighbours, paired_spans
from kv_transfer.transport import Span


def ids(*values: int) -> list[BlockId]:
    return [BlockId(value) for value in values]


def test_runs_on_both_sides_become_one_descriptor() -> None:
    assert paired_spans(ids(4, 5, 6), ids(9, 10, 11), 100) == ([Span(400, 300)], [Span(900, 300)])


def test_a_gap_on_either_side_splits() -> None:
    local, target = paired_spans(ids(0, 1, 2), ids(5, 7, 8), 10)
    assert local == [Span(0, 10), Span(10, 20)]
    assert target == [Span(50, 10), Span(70, 20)]


def test_descending_runs_merge_too() -> None:
    assert paired_spans(ids(3, 2, 1), ids(8, 7, 6), 10) == ([Span(10, 30)], [Span(60, 30)])


def test_opposite_directions_do_not_merge() -> None:
    local, target = paired_spans(ids(1, 2), ids(8, 7), 10)
    assert (local, target) == ([Span(10, 10), Span(20, 10)], [Span(80, 10), Span(70, 10)])


def test_nothing_is_nothing() -> None:
    assert paired_spans([], [], 10) == ([], [])


def test_unequal_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks: 1 local, 2 remote"):
        paired_spans(ids(1), ids(1, 2), 10)


def test_unequal_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes in a pair of spans: 1 local, 2 remote"):
        merge_neighbours([Span(0, 1)], [Span(0, 2)])


@pytest.mark.parametrize("span", [Span(-1, 2), Span(0, 0), Span(5, 6)])
def test_a_span_outside_its_region_is_refused(span: Span) -> None:
    outside, inside = [Span(0, 10), span], [Span(0, 10), Span(0, span.num_bytes)]
    with pytest.raises(ValueError, match=r"local Span.* is not inside the region of 10 bytes"):
        check_spans(outside, 10, inside, 99)
    with pytest.raises(ValueError, match=r"remote Span.* is not inside the region of 10 bytes"):
        check_spans([Span(0, 10)], 99, [Span(1, 10)], 10)


def test_spans_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="spans: 1 local, 2 remote"):
        check_spans([Span(0, 1)], 10, [Span(0, 1), Span(1, 1)], 10)
    with pytest.raises(ValueError, match="bytes in a pair of spans: 1 local, 2 remote"):
        check_spans([Span(0, 1)], 10, [Span(0, 2)], 10)
    check_spans([Span(9, 1)], 10, [Span(0, 1)], 1)
