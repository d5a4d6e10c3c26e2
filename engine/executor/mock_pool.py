"""The bytes that the mock executor leaves in the pool, reached through the layout's strides.

Every position's mark stands at both ends of its block: in the first layer's first key tile and in
the last layer's last value tile, so that a block of which only a part arrived is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.ids import BlockId
from core.kv_layout import KvDtype, KvLayout, block_major
from core.memory_region import MemoryRegion
from engine.executor.mock_tokens import Marks

_MARK_BYTES = 8


def mock_layout(block_size: int = 16) -> KvLayout:
    """Return a small layout for the mock: 1 layer, 1 head of 8 floats; 64 bytes a token."""
    return block_major(
        model="6d6f636b",
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        block_size=block_size,
        dtype=KvDtype.F32,
    )


class MockPool:
    """Views of a region as marks; made anew when a fence has moved it."""

    def __init__(self, layout: KvLayout, region: MemoryRegion, num_blocks: int) -> None:
        if layout.layers[0].token_stride < _MARK_BYTES or layout.layers[0].token_stride % 4:
            msg = f"token_stride {layout.layers[0].token_stride}: a mark needs {_MARK_BYTES} bytes"
            raise ValueError(msg)
        if num_blocks * layout.block_bytes > region.num_bytes:
            msg = f"{num_blocks} blocks of {layout.block_bytes} bytes exceed {region.num_bytes}"
            raise ValueError(msg)
        self._layout = layout
        self._region = region
        self._num_blocks = num_blocks
        self._generation = region.generation
        self._make_views()

    def refresh(self) -> None:
        """Follow the region to its current address; call at the start of a step."""
        if self._region.generation != self._generation:
            self._generation = self._region.generation
            self._make_views()

    def zero(self, block_id: BlockId) -> None:
        """Clear a block."""
        self._blocks[block_id] = 0

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Copy a block."""
        self._blocks[target] = self._blocks[source]

    def write(self, table: Sequence[BlockId], first_position: int, marks: Marks) -> None:
        """Put the marks of consecutive positions into their blocks.

        Args:
            table: block ids by position // block_size; must cover all positions.
            marks: uint64 [positions].
        """
        at = self._locate(table, np.arange(first_position, first_position + len(marks)))
        self._keys[at] = marks
        self._values[at] = marks

    def read(self, table: Sequence[BlockId], num_positions: int) -> Marks:
        """Return the marks of positions 0 to `num_positions` - 1, uint64 [positions]; one whose two
        copies differ comes back wrong."""
        at = self._locate(table, np.arange(num_positions))
        keys = self._keys[at]
        return keys ^ ((keys ^ self._values[at]) << np.uint64(1))

    def close(self) -> None:
        """Let go of the region's memory."""
        del self._blocks, self._keys, self._values

    def _locate(
        self, table: Sequence[BlockId], positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        block_ids = np.asarray(table, dtype=np.int64)
        index, offset = np.divmod(positions, self._layout.block_size)
        return block_ids[index], offset

    def _make_views(self) -> None:
        layout, view = self._layout, self._region.view()
        shape = (self._num_blocks, layout.block_bytes)
        self._blocks = np.frombuffer(view, np.uint8, count=shape[0] * shape[1]).reshape(shape)
        first, last = layout.layers[0], layout.layers[-1]
        last_tile = last.offset + (layout.num_kv_heads - 1) * last.head_stride + last.kv_stride
        self._keys = self._marks(view, first.offset, first.token_stride)
        self._values = self._marks(view, last_tile, last.token_stride)

    def _marks(self, view: memoryview, offset: int, token_stride: int) -> Marks:
        layout = self._layout
        return np.ndarray(
            (self._num_blocks, layout.block_size),
            dtype=np.uint64,
            buffer=view,
            offset=offset,
            strides=(layout.block_bytes, token_stride),
        )
