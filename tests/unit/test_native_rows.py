"""Native norms, rotations and the writing of keys and values, against numpy in float64."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from core.kv_layout import KvDtype
from engine.kernels.cpu.library import kernel_tables
from tests.native_attention import Heads, NativePool, Rows, spread

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

EPS: Final = 1e-5
SHAPES: Final = (Heads(9, 3, 64, 16), Heads(2, 1, 20, 8), Heads(4, 2, 80, 24), Heads(3, 3, 18, 16))

tables = pytest.mark.parametrize(
    "table", kernel_tables(), ids=[table.name.decode() for table in kernel_tables()]
)
kv_dtypes = pytest.mark.parametrize("dtype", KvDtype)
shapes = pytest.mark.parametrize("heads", SHAPES, ids=lambda it: "-".join(map(str, it)))


def drawn(*shape: int) -> Floats:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def normalized(x: Floats, weight: Floats) -> Doubles:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + EPS) * weight


# -- norms


@tables
@pytest.mark.parametrize("width", [1, 15, 16, 40, 64, 100, 576, 1000])
def test_rms_norm(table: Any, width: int) -> None:
    x, weight = drawn(width) * 3, drawn(width)[::-1].copy()
    out = np.full(width + 16, np.nan, np.float32)
    table.rms_norm(x.ctypes.data, weight.ctypes.data, width, EPS, out.ctypes.data)
    np.testing.assert_allclose(out[:width], normalized(x, weight), rtol=3e-6)
    assert np.isnan(out[width:]).all(), "what stands behind a row is not touched"


@tables
@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 128])
def test_qk_norm_normalizes_each_head(table: Any, head_dim: int) -> None:
    x, weight = drawn(5, head_dim) * 3, drawn(5, head_dim)[::-1].copy()
    expected = normalized(x, weight)
    kept = np.concatenate([x.ravel(), np.ones(16, np.float32)])
    table.qk_norm(kept.ctypes.data, weight.ctypes.data, 5, head_dim, EPS)
    np.testing.assert_allclose(kept[:-16].reshape(5, head_dim), expected, rtol=3e-6, atol=1e-7)
    assert (kept[-16:] == 1).all(), "the heads behind are not normalized"


# -- rotations and the pool


class Written:
    """Three tokens at positions that end one block and begin the next, in an else empty pool."""

    def __init__(self, table: Any, dtype: KvDtype, heads: Heads, *, rotary: bool) -> None:
        self.heads = heads
        self.pool = NativePool(table, dtype, heads, num_blocks=4)
        self.rows = Rows((2, 0), heads.block_size - 2, 3)
        width = heads.num_heads + 2 * heads.num_kv_heads
        self.given = drawn(3, width, heads.head_dim)
        self.given[1, -1] = 0  # a head of zeros has no scale
        angles = drawn(heads.block_size * 2, heads.head_dim // 2) * 3
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        self.qkv = self.given.reshape(3, -1).copy()
        cos, sin = (self.cos, self.sin) if rotary else (None, None)
        self.pool.write(self.qkv, self.rows, cos, sin, scale=0.125)
        self.rotated = self._rotated() if rotary else self.given.astype(np.float64)
        if dtype is KvDtype.INT8:
            self.rotated = spread(self.rotated)

    def _rotated(self) -> Doubles:
        at = list(self.rows.positions)
        cos, sin = self.cos[at][:, None].astype(np.float64), self.sin[at][:, None]
        first, second = np.split(self.given.astype(np.float64), 2, axis=-1)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    def read(self) -> tuple[Doubles, Doubles]:
        """Return the three tokens' keys and values, [3, kv_heads, head_dim]."""
        keys, values = self.pool.read(self.rows, self.rows.positions.stop)
        return keys[-3:], values[-3:]


@tables
@shapes
@kv_dtypes
@pytest.mark.parametrize("rotary", [True, False])
def test_queries_are_rotated_and_scaled_in_place(
    table: Any, heads: Heads, dtype: KvDtype, rotary: bool
) -> None:
    made = Written(table, dtype, heads, rotary=rotary)
    queries = made.qkv.reshape(made.given.shape)[:, : heads.num_heads]
    expected = made.rotated[:, : heads.num_heads] * 0.125
    np.testing.assert_allclose(queries, expected, rtol=1e-6, atol=1e-6)


@tables
@shapes
@kv_dtypes
@pytest.mark.parametrize("rotary", [True, False])
def test_keys_and_values_are_written_rounded(
    table: Any, heads: Heads, dtype: KvDtype, rotary: bool
) -> None:
    made = Written(table, dtype, heads, rotary=rotary)
    first_key, first_value = heads.num_heads, heads.num_heads + heads.num_kv_heads
    for kept, exact in zip(
        made.read(),
        (made.rotated[:, first_key:first_value], made.given[:, first_value:]),
        strict=True,
    ):
        largest = np.abs(exact).max(axis=-1, keepdims=True)
        step = {
            KvDtype.F32: 1e-6 * largest,
            KvDtype.BF16: np.abs(exact) / 256 + 1e-6 * largest,
            KvDtype.INT8: largest / 254 * 1.001,
        }[dtype]
        assert (np.abs(kept - exact) <= step + 1e-30).all()
        if dtype is KvDtype.INT8:  # the largest magnitude takes the whole range
            np.testing.assert_allclose(np.abs(kept).max(axis=-1, keepdims=True), largest, rtol=1e-5)


@tables
@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 96, 128, 256])
def test_what_is_rounded_to_8_bits_is_spread_and_keeps_its_products(
    table: Any, head_dim: int
) -> None:
    """One large dimension of a key would take the whole range of its scale."""
    made = NativePool(table, KvDtype.INT8, Heads(1, 1, head_dim, 8), num_blocks=1)
    qkv = drawn(1, 3 * head_dim)
    qkv[0, head_dim + 1] = 50
    query, key = np.split(qkv[0, : 2 * head_dim].astype(np.float64), 2)
    made.write(qkv, Rows((0,), 0, 1))
    kept = made.read(Rows((0,), 0, 1), 1)[0].ravel()
    size = min(128, head_dim & -head_dim)
    step = 50 / 254 / np.sqrt(size) + 5 / 254  # of what it was spread to
    assert np.abs(kept - spread(key)).max() < step
    assert abs(qkv[0, :head_dim] @ kept - query @ key) < 4 * step * np.sqrt(head_dim)


@tables
def test_bf16_is_rounded_to_nearest_ties_to_even(table: Any) -> None:
    made = NativePool(table, KvDtype.BF16, Heads(1, 1, 64, 8), num_blocks=1)
    halves = np.random.default_rng(0).integers(0, 1 << 15, 128).astype(np.uint32)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x8000, 0x8000], np.uint32)
    halves[halves >= 0x7F00] = 0x4000  # finite, and rounded to finite
    bits = (halves << 16) + np.resize(low, 128)
    row = np.concatenate([np.zeros(64, np.float32), bits.view(np.float32)])
    made.write(row[None].copy(), Rows((0,), 0, 1))
    up = (np.resize(low, 128) > 0x8000) | ((np.resize(low, 128) == 0x8000) & (halves % 2 == 1))
    expected = ((halves + up) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    kept = np.concatenate([part.ravel() for part in made.read(Rows((0,), 0, 1), 1)])
    assert np.array_equal(kept, expected)


@tables
@shapes
@kv_dtypes
def test_nothing_else_in_the_pool_is_written(table: Any, heads: Heads, dtype: KvDtype) -> None:
    made = Written(table, dtype, heads, rotary=True)
    per_head = 2 * heads.head_dim * dtype.num_bytes + (8 if dtype is KvDtype.INT8 else 0)
    changed = np.count_nonzero(made.pool.memory != 0xFF)
    most = 3 * heads.num_kv_heads * per_head
    assert most * 0.9 < changed <= most, "0xFF may also be written"
    unused = made.pool.memory.reshape(4, -1)[[1, 3]]
    assert (unused == 0xFF).all()
