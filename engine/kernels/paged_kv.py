"""The KV pool as tensors: an array of tiles, whatever order the layout puts them in.

A tile is one block's [block_size, head_dim] of one layer, one head, keys or values. Where every
stride of the layout is a whole number of tiles, the pool is [tiles, block_size * head_dim], and a
place is a number:

    tile(block, layer, head, kv) = block * tiles_per_block + layer_tile[layer] + head_tile[head, kv]
    row(token) = tile * block_size + token % block_size

Indices are made once a step without the layer; a layer's view starts at its own first tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from core.ids import BlockId
from core.kv_layout import KvDtype, KvLayout
from core.memory_region import MemoryRegion

TORCH_DTYPE = {KvDtype.F32: torch.float32, KvDtype.BF16: torch.bfloat16}


class PagedKv:
    """Reads and writes one rank's blocks. Owns no memory: the region does.

    Args:
        layout: dtype, head and k|v strides must be the same in all layers, and tiles contiguous.
        region: at least num_blocks * layout.block_bytes bytes of this process's memory.
        num_blocks: blocks that may be addressed.

    Raises:
        ValueError: the layout is not an array of tiles, or the region is too small.

    Attributes:
        device: where the region's memory is; indices are made and expected there.
    """

    def __init__(self, layout: KvLayout, region: MemoryRegion, num_blocks: int) -> None:
        if region.num_bytes < num_blocks * layout.block_bytes:
            msg = (
                f"{num_blocks} blocks of {layout.block_bytes} bytes do not fit into a region of "
                f"{region.num_bytes} bytes"
            )
            raise ValueError(msg)
        first = layout.layers[0]
        tile_bytes = layout.block_size * layout.head_dim * first.dtype.num_bytes
        _check_tiles(layout, tile_bytes)
        self.dtype = TORCH_DTYPE[first.dtype]
        self.block_size = layout.block_size
        self.num_kv_heads = layout.num_kv_heads
        self.head_dim = layout.head_dim
        self.num_blocks = num_blocks
        self._region = region
        self._num_bytes = num_blocks * layout.block_bytes
        self._tiles_per_block = layout.block_bytes // tile_bytes
        self._layer_tile = [layer.offset // tile_bytes for layer in layout.layers]
        head_tile = [
            [(head * first.head_stride + kv * first.kv_stride) // tile_bytes for kv in (0, 1)]
            for head in range(layout.num_kv_heads)
        ]
        self.device = elements_of(region, self._num_bytes, self.dtype).device
        self._head_tile = torch.tensor(head_tile).to(self.device)  # [kv_heads, 2]
        offsets = torch.tensor(self._layer_tile).to(self.device)[:, None, None] + self._head_tile
        self._block_tiles = offsets.flatten()  # all tiles of a block, from its first
        self._generation = -1
        self.refresh()

    def refresh(self) -> None:
        """Make the views anew where the region has moved since; call at the start of each step."""
        if self._region.generation == self._generation:
            return
        flat = elements_of(self._region, self._num_bytes, self.dtype)
        rows = flat.view(-1, self.head_dim)
        self._tiles = flat.view(-1, self.block_size, self.head_dim)
        self._layer_tiles = [self._tiles[tile:].flatten(1) for tile in self._layer_tile]
        self._layer_rows = [rows[tile * self.block_size :] for tile in self._layer_tile]
        self._generation = self._region.generation

    def zero(self, block_ids: Sequence[BlockId]) -> None:
        """Fill whole blocks with zeros."""
        for block_id in block_ids:
            self.zero_tail(block_id, 0)

    def zero_tail(self, block_id: BlockId, first: int) -> None:
        """Fill positions [first, block_size) of a block with zeros, in all layers."""
        self._tiles[self._tiles_of(block_id), first:] = 0

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Copy a whole block."""
        self._tiles[self._tiles_of(target)] = self._tiles[self._tiles_of(source)]

    def _tiles_of(self, block_id: BlockId) -> Tensor:
        return self._block_tiles + block_id * self._tiles_per_block

    def rows_at(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """Return row indices for `write`.

        Args:
            block_ids: int64 [tokens].
            offsets: int64 [tokens], positions inside the block.
        """
        tiles = (block_ids * self._tiles_per_block)[:, None, None] + self._head_tile
        return (tiles * self.block_size + offsets[:, None, None]).flatten()

    def tiles_at(self, block_ids: Tensor) -> Tensor:
        """Return tile indices for `gather` in the order [..., kv_heads, 2, blocks].

        Args:
            block_ids: int64 [..., blocks].
        """
        tiles = (block_ids * self._tiles_per_block)[..., None, None, :] + self._head_tile[
            :, :, None
        ]
        return tiles.flatten()

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store one layer's keys and values, already of the pool's type.

        Args:
            layer: whose part of the blocks.
            rows: from `rows_at`.
            keys_values: [tokens, kv_heads, 2, head_dim], contiguous.
        """
        self._layer_rows[layer].index_copy_(0, rows, keys_values.view(-1, self.head_dim))

    def gather(self, layer: int, tiles: Tensor) -> Tensor:
        """Copy one layer's tiles out: [len(tiles), block_size * head_dim]."""
        return torch.index_select(self._layer_tiles[layer], 0, tiles)


def elements_of(region: MemoryRegion, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Return a region's first bytes as a flat tensor without copying them."""
    return torch.frombuffer(region.view()[:num_bytes], dtype=dtype)


def _check_tiles(layout: KvLayout, tile_bytes: int) -> None:
    first = layout.layers[0]
    if first.tile_order != "token_major" or first.scale_offset != -1:
        msg = (
            f"tile order {first.tile_order!r} with scales at {first.scale_offset} is not supported"
        )
        raise ValueError(msg)
    strides = {layout.block_bytes, first.head_stride, first.kv_stride}
    strides |= {layer.offset for layer in layout.layers}
    if first.token_stride * layout.block_size != tile_bytes:
        msg = f"token stride {first.token_stride}: tokens of a tile must be contiguous"
        raise ValueError(msg)
    if any(stride % tile_bytes for stride in strides):
        msg = f"strides {sorted(strides)}: all must be multiples of a tile's {tile_bytes} bytes"
        raise ValueError(msg)
    for one, other in pairwise(layout.layers):
        same = ("head_stride", "kv_stride", "token_stride", "dtype", "scale_offset", "tile_order")
        if any(getattr(one, name) != getattr(other, name) for name in same):
            msg = f"layers differ: {one} and {other}; only their offsets may"
            raise ValueError(msg)
