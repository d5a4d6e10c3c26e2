"""Weights packed for the native kernels, in one stretch of memory that workers can share.

    matrix     data | scales | minimums | sums | bias     each from a multiple of 64 bytes on
    vector     float32

Where everything lies follows from the program, the types and the kernels' sizes alone, so a file of
packed weights needs no directory (`packed_file`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.executor.native_program import PANEL, MatrixSource, NativeProgram, VectorSource
from engine.kernels.cpu.abi import Matrix, WeightType
from engine.models.tensor_shapes import Shape
from engine.models.weights import StoredWeight, Weights

PACKING_VERSION: Final = 2
"""Raised with every change of what packed bytes mean."""

WeightsKind = Literal["f32", "bf16", "int8", "native"]

_ALIGNMENT: Final = 64
_GROUPS: Final = {  # input features that share a scale
    WeightType.BF16: 2,
    WeightType.INT8: 64,
    WeightType.Q8_0: 32,
    WeightType.Q4_0: 32,
    WeightType.Q4_1: 32,
}
_KEPT: Final = {
    "F32": WeightType.F32,
    "F16": WeightType.F32,
    "BF16": WeightType.BF16,
    "Q8_0": WeightType.Q8_0,
    "Q4_0": WeightType.Q4_0,
    "Q4_1": WeightType.Q4_1,
}
_BLOCKS: Final = frozenset({WeightType.Q8_0, WeightType.Q4_0, WeightType.Q4_1})
_BLOCK_NAMES: Final = frozenset({"Q8_0", "Q4_0", "Q4_1"})
_SLICE_ROWS: Final = 4096  # unpacked at once: float32 of a whole embedding would be 113 MB

Bytes = npt.NDArray[np.uint8]
Dtypes = Mapping[str, str]
"""The file's name of each weight's type."""


def choose_kind(choice: str, dtypes: Dtypes) -> WeightsKind:
    """Resolve `engine.weights`: "auto" keeps blocks that the kernels know, else it is bf16."""
    match choice:
        case "f32" | "bf16" | "int8" | "native":
            return choice
        case _:
            return "native" if _BLOCK_NAMES & set(dtypes.values()) else "bf16"


def type_of(source: MatrixSource, kind: WeightsKind, dtypes: Dtypes) -> WeightType:
    """Return how a matrix is kept. Of parts of several types, blocks cannot be stacked."""
    match kind:
        case "f32":
            return WeightType.F32
        case "bf16":
            return WeightType.BF16
        case "int8":
            return WeightType.INT8
        case "native":
            found = {dtypes[name] for name, _ in source.parts}
            return _KEPT.get(found.pop(), WeightType.INT8) if len(found) == 1 else WeightType.INT8


class _Place(NamedTuple):
    """How a matrix is kept, and where its parts start; None where it has no such part."""

    type: WeightType
    data: int | None
    scales: int | None
    minimums: int | None
    sums: int | None
    bias: int | None


class WeightLayout:
    """Where each matrix and vector lies.

    Args:
        program: names them.
        kind: how matrices are kept.
        dtypes: of the model's file.
        shapes: of the model's weights.
        table: the kernels that will read them (one of `kernel_tables`).

    Attributes:
        num_bytes: of all.
    """

    def __init__(
        self,
        program: NativeProgram,
        kind: WeightsKind,
        dtypes: Dtypes,
        shapes: Mapping[str, Shape],
        table: Any,
    ) -> None:
        self._table = table
        self.num_bytes = 0
        centred = program.centred_matrices
        self._matrices = {
            source: self._place(source, type_of(source, kind, dtypes), has_sums=source in centred)
            for source in program.matrices
        }
        self._vectors: dict[VectorSource, int] = {}
        for source in program.vectors:
            self._vectors[source] = self.num_bytes
            self._take(4 * sum(shapes[name][0] * count for name, count in source.parts))

    def _place(self, source: MatrixSource, kind: WeightType, *, has_sums: bool) -> _Place:
        sizes = (ctypes.c_int64 * 4)()
        self._table.packed_sizes(kind, source.out_features, source.in_features, ctypes.byref(sizes))
        if not has_sums:
            sizes[3] = 0
        # An even number of panels: interleaved halves of 8 outputs are two.
        bias_bytes = 4 * -(-source.out_features // (2 * PANEL)) * 2 * PANEL if source.biases else 0
        return _Place(kind, *(self._take(size) for size in (*sizes, bias_bytes)))

    def _take(self, num_bytes: int) -> int | None:
        if not num_bytes:
            return None
        start = self.num_bytes
        self.num_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return start

    def pack(self, weights: Weights, memory: Bytes) -> None:
        """Read every weight and pack it.

        Args:
            weights: of the model.
            memory: uint8 [num_bytes], zeros, from a multiple of 64 bytes on.
        """
        for source in self._matrices:
            matrix = self.matrix(source, memory)
            for name, first in source.parts:
                self._pack_rows(matrix, weights[name], first, interleaved=source.interleaved)
            self._pack_bias(source, weights, memory)
        for source, start in self._vectors.items():
            parts = [np.tile(weights[name].float32(), count) for name, count in source.parts]
            values = np.concatenate(parts)
            memory[start : start + values.nbytes] = values.view(np.uint8)

    def _pack_rows(
        self, matrix: Matrix, weight: StoredWeight, first: int, *, interleaved: bool
    ) -> None:
        for start in range(0, weight.shape[0], _SLICE_ROWS):
            part = weight.rows(start, _SLICE_ROWS)
            if matrix.type in _BLOCKS:
                rows: Any = np.ascontiguousarray(part.raw)
            else:
                rows = part.float32()
            self._table.pack_rows(
                ctypes.byref(matrix), rows.ctypes.data, first + start, part.shape[0], interleaved
            )

    def _pack_bias(self, source: MatrixSource, weights: Weights, memory: Bytes) -> None:
        start = self._matrices[source].bias
        if start is None:
            return
        bias = np.zeros(-(-source.out_features // (2 * PANEL)) * 2 * PANEL, np.float32)
        half = source.out_features // 2
        for name, (_, first) in zip(source.biases, source.parts, strict=True):
            values = weights[name].float32()
            rows = first + np.arange(len(values))
            if source.interleaved:
                alone = rows % half if half else rows
                rows = (2 * (alone // PANEL) + (rows >= half)) * PANEL + alone % PANEL
            bias[rows] = values
        memory[start : start + bias.nbytes] = bias.view(np.uint8)

    def matrix(self, source: MatrixSource, memory: Bytes) -> Matrix:
        """Return the library's description of a matrix in packed memory."""
        place, base = self._matrices[source], memory.ctypes.data

        def address(offset: int | None) -> int | None:
            return None if offset is None else base + offset

        return Matrix(
            type=place.type,
            out_features=source.out_features,
            in_features=source.in_features,
            group=_GROUPS.get(place.type, 1),
            data=address(place.data),
            scales=address(place.scales),
            minimums=address(place.minimums),
            sums=address(place.sums),
            bias=address(place.bias),
        )

    def vector(self, source: VectorSource, memory: Bytes) -> int:
        """Return a vector's address in packed memory."""
        return memory.ctypes.data + self._vectors[source]
