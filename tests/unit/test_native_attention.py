"""Native attention, on every instruction set that this processor runs, against numpy in float64."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from core.kv_layout import KvDtype
from engine.kernels.cpu.library import kernel_tables
from tests.native_attention import NO_BLOCK, Heads, NativePool, Rows

Floats = npt.NDArray[np.float32]

SMOLLM2: Final = Heads(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16)
SHAPES: Final = (
    SMOLLM2,
    Heads(2, 2, 16, 8),
    Heads(4, 1, 20, 24),  # a head of a vector and a rest; a block of a group and a half
    Heads(5, 1, 48, 16),
    Heads(14, 2, 80, 32),  # seven heads: two tiles
    Heads(6, 1, 96, 16),
    Heads(8, 1, 128, 40),
    Heads(3, 3, 18, 16),  # quads beyond the head's end
    Heads(10, 1, 64, 16),
)

tables = pytest.mark.parametrize(
    "table", kernel_tables(), ids=[table.name.decode() for table in kernel_tables()]
)
kv_dtypes = pytest.mark.parametrize("dtype", KvDtype)
shapes = pytest.mark.parametrize("heads", SHAPES, ids=lambda it: "-".join(map(str, it)))


class Scene:
    """Sequences whose tokens are in a pool, and queries for their last rows.

    Blocks are scattered over the pool, others and the tails of the last are NaN, and a table goes
    on with blocks that are no memory.
    """

    def __init__(
        self, table: Any, dtype: KvDtype, heads: Heads, ends: list[tuple[int, int]]
    ) -> None:
        """Each sequence as (start, rows)."""
        random = np.random.default_rng(len(ends))
        size = heads.block_size
        counts = [-(-(start + rows) // size) for start, rows in ends]
        ids = random.permutation(sum(counts) + 3)
        self.pool = NativePool(table, dtype, heads, len(ids))
        self.sequences: list[Rows] = []
        for (start, rows), count in zip(ends, counts, strict=True):
            blocks = (*map(int, ids[:count]), NO_BLOCK)
            ids = ids[count:]
            self.sequences.append(Rows(blocks, start, rows))
            width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
            qkv = random.standard_normal((start + rows, width)).astype(np.float32)
            self.pool.write(qkv, Rows(blocks, 0, start + rows))
        width = heads.num_heads * heads.head_dim
        num_rows = sum(rows for _, rows in ends)
        self.queries = random.standard_normal((num_rows, width)).astype(np.float32)
        self.queries *= 3 / heads.head_dim**0.5

    def attend(self, **cut: Any) -> Floats:
        return self.pool.attend(self.queries, self.sequences, **cut)

    def check(self, window: int = 0) -> None:
        expected = self.pool.expected(self.queries, self.sequences, window)
        np.testing.assert_allclose(self.attend(window=window), expected, rtol=2e-5, atol=2e-5)


# -- what it computes


@tables
@kv_dtypes
@shapes
def test_attention_is_what_float64_says(table: Any, dtype: KvDtype, heads: Heads) -> None:
    Scene(table, dtype, heads, [(0, 1), (16, 1), (299, 1), (0, 37), (250, 9)]).check()


@tables
@kv_dtypes
def test_a_long_context_spans_segments(table: Any, dtype: KvDtype) -> None:
    Scene(table, dtype, SMOLLM2, [(1100, 1), (511, 2), (480, 70)]).check()


@tables
@kv_dtypes
@pytest.mark.parametrize("window", [1, 5, 16, 100, 290])
def test_a_window_ends_what_is_seen(table: Any, dtype: KvDtype, window: int) -> None:
    Scene(table, dtype, SMOLLM2, [(0, 40), (299, 1), (270, 40)]).check(window)


@tables
@kv_dtypes
def test_a_chunk_of_512_rows(table: Any, dtype: KvDtype) -> None:
    Scene(table, dtype, Heads(3, 1, 64, 16), [(100, 512)]).check()


@tables
@kv_dtypes
def test_scores_far_apart_stay_finite(table: Any, dtype: KvDtype) -> None:
    """The largest score may come first, or last, by thousands."""
    scene = Scene(table, dtype, SMOLLM2, [(520, 3)])
    scene.queries *= 1000
    attended = scene.attend()
    assert np.isfinite(attended).all()
    expected = scene.pool.expected(scene.queries, scene.sequences)
    np.testing.assert_allclose(attended, expected, rtol=1e-3, atol=1e-3)


# -- what it must not read


@tables
@kv_dtypes
@shapes
def test_blocks_before_a_window_are_not_read(table: Any, dtype: KvDtype, heads: Heads) -> None:
    scene = Scene(table, dtype, heads, [(299, 1)])
    expected = scene.attend(window=50)
    rows = scene.sequences[0]
    unseen = (299 - 50 + 1) // heads.block_size
    scene.sequences[0] = Rows((NO_BLOCK,) * unseen + rows.table[unseen:], 299, 1)
    assert np.array_equal(scene.attend(window=50), expected)


@tables
@kv_dtypes
def test_positions_that_are_not_there_yet_change_no_bit(table: Any, dtype: KvDtype) -> None:
    """Rows of a chunk do not see the rows after them, whatever these hold."""
    scene = Scene(table, dtype, SMOLLM2, [(250, 30)])
    whole = scene.attend()
    early = Scene(table, dtype, SMOLLM2, [(250, 30)])
    rows = early.sequences[0]
    early.pool.memory[:] = 0xFF
    width = (9 + 2 * 3) * 64
    qkv = np.random.default_rng(1)  # what Scene draws: the permutation first
    qkv.permutation(18 + 3)
    tokens = qkv.standard_normal((280, width)).astype(np.float32)
    early.pool.write(tokens[:263], Rows(rows.table, 0, 263))
    assert np.array_equal(early.attend()[:13], whole[:13])


@tables
@kv_dtypes
def test_a_row_that_is_not_finite_stays_alone(table: Any, dtype: KvDtype) -> None:
    scene = Scene(table, dtype, SMOLLM2, [(250, 30)])
    whole = scene.attend()
    rows = scene.sequences[0]
    broken = np.full((1, (9 + 2 * 3) * 64), np.inf, np.float32)
    scene.pool.write(broken, Rows(rows.table, 263, 1))
    assert np.array_equal(scene.attend()[:13], whole[:13])
    assert not np.isfinite(scene.attend()[13]).any()


# -- that nothing else decides a bit


@tables
@kv_dtypes
@shapes
@pytest.mark.parametrize(
    "window", [0, 40, 270]
)  # the last: two segments, begun at different places
def test_no_cut_changes_a_bit(table: Any, dtype: KvDtype, heads: Heads, window: int) -> None:
    scene = Scene(table, dtype, heads, [(0, 35), (241, 33), (299, 1), (300, 5)])
    whole = scene.attend(window=window)
    for cut in (
        {"rows_at_once": 1},
        {"rows_at_once": 3},
        {"rows_at_once": 7},
        {"heads_at_once": 1},
        {"heads_at_once": 1, "rows_at_once": 5},
        {"poison": 0.0},
    ):
        assert np.array_equal(scene.attend(window=window, **cut), whole), cut


@tables
@kv_dtypes
def test_the_place_of_a_sequence_changes_no_bit(table: Any, dtype: KvDtype) -> None:
    together = Scene(table, dtype, SMOLLM2, [(299, 1), (40, 20), (511, 1)])
    attended = together.attend()
    order = [2, 0, 1]
    first = [0, 1, 21, 22]
    moved = [together.sequences[i] for i in order]
    queries = np.concatenate([together.queries[first[i] : first[i + 1]] for i in order])
    again = together.pool.attend(queries, moved)
    expected = np.concatenate([attended[first[i] : first[i + 1]] for i in order])
    assert np.array_equal(again, expected)
