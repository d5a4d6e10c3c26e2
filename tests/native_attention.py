"""One layer of a KV pool on one native kernel table, and what attention over it should be."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from core.kv_layout import KvDtype, KvLayout, Tile, TileOrder, blocks_of
from engine.kernels.cpu.abi import AttentionTask, KvLayer, KvType, Sequence
from tests.native_linear import aligned

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

KV_TYPES = {
    KvDtype.F32: KvType.F32,
    KvDtype.BF16: KvType.BF16,
    KvDtype.INT8: KvType.INT8,
}
LAYER = 1
NO_BLOCK = 1 << 30
"""An id whose address is no memory: reading it ends the process."""


class Heads(NamedTuple):
    """What a model's attention is."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence, from position `start` on."""

    table: tuple[int, ...]
    start: int
    num_rows: int

    @property
    def positions(self) -> range:
        """Of the rows."""
        return range(self.start, self.start + self.num_rows)


class NativePool:
    """Two layers of blocks that hold NaN until they are written; the second is used."""

    def __init__(self, table: Any, dtype: KvDtype, heads: Heads, num_blocks: int) -> None:
        self.table, self.dtype, self.heads = table, dtype, heads
        self.layout = native_layout(dtype, heads)
        self.memory = aligned(num_blocks * self.layout.block_bytes, 0xFF)
        place = self.layout.layers[LAYER]
        self.layer = KvLayer(
            base=self.memory.ctypes.data + place.offset,
            block_stride=self.layout.block_bytes,
            head_stride=place.head_stride,
            value_offset=place.kv_stride,
            scale_offset=place.scale_offset,
            type=KV_TYPES[dtype],
            block_size=heads.block_size,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
        )

    def write(
        self,
        qkv: Floats,
        rows: Rows,
        cos: Floats | None = None,
        sin: Floats | None = None,
        scale: float = 1.0,
    ) -> None:
        """Rotate in place and write, token by token.

        Args:
            qkv: [rows, (heads + 2 kv heads) * head_dim].
            rows: where they stand.
            cos, sin: [positions, head_dim / 2].
            scale: of the queries.
        """
        for row, position in enumerate(rows.positions):
            self.table.rope_kv_write(
                qkv[row].ctypes.data,
                None if cos is None else cos[position].ctypes.data,
                None if sin is None else sin[position].ctypes.data,
                self.heads.num_heads,
                scale,
                ctypes.byref(self.layer),
                rows.table[position // self.heads.block_size],
                position % self.heads.block_size,
                0,
                self.heads.num_kv_heads,
            )

    def read(self, rows: Rows, num_tokens: int) -> tuple[Doubles, Doubles]:
        """Return a sequence's first keys and values, each [tokens, kv_heads, head_dim]."""
        tiles = [
            [
                [self._tile(block, head, kv) for kv in (0, 1)]
                for head in range(self.heads.num_kv_heads)
            ]
            for block in rows.table[: -(-num_tokens // self.heads.block_size)]
        ]
        # [blocks, kv_heads, 2, block_size, head_dim] -> [2, tokens, kv_heads, head_dim]
        both = np.array(tiles).transpose(2, 0, 3, 1, 4)
        keys, values = both.reshape(2, -1, self.heads.num_kv_heads, self.heads.head_dim)
        return keys[:num_tokens], values[:num_tokens]

    def _tile(self, block: int, head: int, kv: int) -> Doubles:
        """Return [block_size, head_dim]."""
        place = self.layout.layers[LAYER]
        start = block * self.layout.block_bytes + place.offset
        start += head * place.head_stride + kv * place.kv_stride
        return decode_tile(
            self.memory[start : start + place.kv_stride], self.dtype, self.heads, is_key=kv == 0
        )

    def attend(
        self,
        queries: Floats,
        sequences: Items[Rows],
        *,
        window: int = 0,
        rows_at_once: int | None = None,
        heads_at_once: int | None = None,
        poison: float = np.nan,
    ) -> Floats:
        """Return [rows, heads * head_dim]; queries are scaled, of the same shape."""
        heads, table = self.heads, self.table
        group = heads.num_heads // heads.num_kv_heads
        at_once = rows_at_once or table.attention_rows(heads.num_heads, heads.num_kv_heads)
        context = max(rows.start + rows.num_rows for rows in sequences)
        shape = (context, heads.num_heads, heads.num_kv_heads, heads.head_dim)
        scratch = aligned(4 * table.attention_scratch(*shape)).view(np.float32)
        scratch[:] = poison
        width = -(-heads.num_heads * heads.head_dim // 64) * 64
        out = aligned(4 * len(queries) * width).view(np.float32).reshape(len(queries), width)
        out[:] = poison
        held = np.zeros_like(out)
        held[:, : queries.shape[1]] = queries
        first_row = 0
        for rows in sequences:
            blocks = np.array(rows.table, np.int32)
            sequence = Sequence(blocks.ctypes.data, first_row, rows.num_rows, rows.start)
            for first in range(0, rows.num_rows, at_once):
                for head in range(0, heads.num_heads, heads_at_once or group):
                    kv_head = head // group
                    task = AttentionTask(
                        layer=ctypes.pointer(self.layer),
                        sequence=ctypes.pointer(sequence),
                        first=first,
                        count=min(at_once, rows.num_rows - first),
                        kv_head=kv_head,
                        first_head=head,
                        num_heads=heads_at_once or group,
                        window=window,
                        queries=held.ctypes.data,
                        queries_ld=width,
                        out=out.ctypes.data,
                        out_ld=width,
                        scratch=scratch.ctypes.data,
                    )
                    table.attention(ctypes.byref(task))
            first_row += rows.num_rows
        return out[:, : heads.num_heads * heads.head_dim].copy()

    def expected(self, queries: Floats, sequences: Items[Rows], window: int = 0) -> Doubles:
        """Return what `attend` should, in float64, of the keys and values that the pool holds."""
        heads = self.heads
        group = heads.num_heads // heads.num_kv_heads
        asked = queries.reshape(len(queries), heads.num_heads, heads.head_dim)
        asked = rounded_queries(asked) if self.dtype is KvDtype.INT8 else asked.astype(np.float64)
        out: list[Doubles] = []
        for rows in sequences:
            keys, values = self.read(rows, rows.start + rows.num_rows)
            keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
            for position in rows.positions:
                first = max(0, position - window + 1) if window else 0
                seen = slice(first, position + 1)
                scores = np.einsum("hd,thd->ht", asked[len(out)], keys[seen])
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                out.append(np.einsum("ht,thd->hd", weights, values[seen]).reshape(-1))
        return np.array(out)


def native_layout(dtype: KvDtype, heads: Heads) -> KvLayout:
    """Return two layers in the order that native kernels read."""
    order: TileOrder = "quads" if dtype is KvDtype.INT8 else "pairs"
    tile = Tile(heads.block_size, heads.head_dim, dtype, order)
    return blocks_of(tile, model="m", num_layers=2, num_kv_heads=heads.num_kv_heads)


def decode_tile(
    tile: npt.NDArray[np.uint8], dtype: KvDtype, heads: Heads, *, is_key: bool
) -> Doubles:
    """Return a tile's [block_size, head_dim] as core/kv_layout.py says that it stands."""
    size, dim = heads.block_size, heads.head_dim
    run = 4 if dtype is KvDtype.INT8 else 2
    padded = -(-dim // run) * run
    elements = _elements(tile, dtype, is_key=is_key)
    if is_key:
        runs = elements[: size * padded].reshape(padded // run, size, run)
        values = runs.transpose(1, 0, 2).reshape(size, padded)[:, :dim]
    else:
        values = elements[: size * dim].reshape(size, dim)
    if dtype is not KvDtype.INT8:
        return values
    start = native_layout(dtype, heads).layers[LAYER].scale_offset
    scales = tile[start : start + 4 * size].view(np.float32)
    return values * scales[:, None].astype(np.float64)


def _elements(tile: npt.NDArray[np.uint8], dtype: KvDtype, *, is_key: bool) -> Doubles:
    if dtype is KvDtype.F32:
        return tile.view(np.float32).astype(np.float64)
    if dtype is KvDtype.BF16:
        return (tile.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if is_key:
        return tile.astype(np.float64) - 128
    return tile.view(np.int8).astype(np.float64)


def rounded_queries(queries: Floats) -> Doubles:
    """Return queries as int8 keys see them: 16 bits, one scale a row and head."""
    largest = np.abs(queries).max(axis=-1, keepdims=True)
    quants = np.rint(queries * (np.float32(127) / largest * np.float32(256)))
    return quants.astype(np.float64) * (largest / np.float32(127 * 256)).astype(np.float64)


def spread(x: Doubles) -> Doubles:
    """Return the last axis after the Hadamard transform that precedes rounding to 8 bits."""
    head_dim = x.shape[-1]
    size = min(128, head_dim & -head_dim)
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.sqrt(2)
    return (x.reshape(*x.shape[:-1], -1, size) @ matrix).reshape(x.shape)
