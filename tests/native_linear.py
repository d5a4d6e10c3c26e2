"""A linear layer on one native kernel table, with numpy arrays for memory."""

from __future__ import annotations

import ctypes
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.cpu.abi import Activations, Epilogue, Matrix, WeightType

Floats = npt.NDArray[np.float32]

GROUPS = {
    WeightType.F32: 1,
    WeightType.BF16: 2,
    WeightType.INT8: 64,
    WeightType.Q8_0: 32,
    WeightType.Q4_0: 32,
    WeightType.Q4_1: 32,
}


def rotate(x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return rows as int8 rounds them, in groups of 64: sums and differences of 16 elements each.

    It is its own inverse, but for a factor of 16.
    """
    plus_minus = np.array([[1, 1], [1, -1]])
    four = np.kron(plus_minus, plus_minus)  # Hadamard's
    turned = np.kron(four, np.kron(np.eye(4), four))
    padded = np.zeros((len(x), -(-x.shape[1] // 64) * 64))
    padded[:, : x.shape[1]] = x
    return (padded.reshape(len(x), -1, 64) @ turned).reshape(padded.shape)


def aligned(num_bytes: int, fill: int = 0) -> npt.NDArray[np.uint8]:
    """Return uint8 [num_bytes] that starts on 64 bytes."""
    memory = np.full(num_bytes + 64, fill, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


@dataclass
class Rows:
    """Activations as a kernel reads them."""

    struct: Activations
    memory: tuple[npt.NDArray[Any], ...]

    @property
    def quants(self) -> npt.NDArray[np.int8]:
        """[rows * padded inputs], and what lies behind."""
        return self.memory[1].view(np.int8)

    @property
    def scales(self) -> Floats:
        """[rows * groups], and what lies behind."""
        return self.memory[2].view(np.float32)

    @property
    def middles(self) -> Floats:
        """Likewise; of GGUF types."""
        return self.memory[4].view(np.float32)


class NativeLinear:
    """One packed layer; `rows` are float32 [out, in] or, for GGUF types, uint8 [out, row bytes]."""

    def __init__(
        self,
        table: Any,
        weight_type: WeightType,
        rows: npt.NDArray[Any],
        in_features: int,
        *,
        bias: Floats | None = None,
        interleave: bool = False,
        centred: bool = True,
    ) -> None:
        self.table, self.type = table, weight_type
        self.out_features, self.in_features = len(rows), in_features
        self.panels = (len(rows) + 15) // 16
        if interleave:
            self.panels = 2 * ((len(rows) // 2 + 15) // 16)
        sizes = (c_int64 * 4)()
        table.packed_sizes(weight_type, self.out_features, in_features, ctypes.byref(sizes))
        self.memory = [aligned(size) for size in sizes]
        data, scales, minimums, sums = (
            part.ctypes.data if len(part) else None for part in self.memory
        )
        self.bias = aligned(self.panels * 64).view(np.float32)
        if bias is not None:
            self.bias[: len(bias)] = bias
        self.matrix = Matrix(
            type=weight_type,
            out_features=self.out_features,
            in_features=in_features,
            group=GROUPS[weight_type],
            data=data,
            scales=scales,
            minimums=minimums,
            sums=sums if centred else None,
            bias=None if bias is None else self.bias.ctypes.data,
        )
        self.centred = self.matrix.sums is not None
        self._pack(rows, interleave=interleave)

    def _pack(self, rows: npt.NDArray[Any], *, interleave: bool) -> None:
        """Pack in two runs, the later rows first: a caller may pack in any order."""
        cut = len(rows) // 3
        for first, last in ((cut, len(rows)), (0, cut)):
            part = np.ascontiguousarray(rows[first:last])
            self.table.pack_rows(
                ctypes.byref(self.matrix), part.ctypes.data, first, last - first, interleave
            )

    def prepare(self, x: Floats) -> Rows:
        """Return the activations of float32 [rows, in]."""
        ld = -(-self.in_features // 64) * 64
        values = aligned(len(x) * ld * 4).view(np.float32).reshape(len(x), ld)
        values[:, : self.in_features] = x
        memory = (values, *(aligned(len(x) * ld * size, 0xEE) for size in (1, 4, 4, 4, 1)))
        first, *rest = (part.ctypes.data for part in memory)
        struct = Activations(first, ld, *rest)
        for row in range(len(x)):
            self.table.prepare_row(ctypes.byref(self.matrix), ctypes.byref(struct), row)
        return Rows(struct, memory)

    def multiply(
        self,
        x: Floats,
        epilogue: Epilogue = Epilogue.STORE,
        out: Floats | None = None,
        panels: tuple[int, int] | None = None,
    ) -> Floats:
        """Return float32 [rows, panels * 16], the products in its first half where gated.

        What is not written stays as in `out`, or NaN.
        """
        first, last = panels or (0, self.panels)
        width = self.panels * 16
        result = aligned(len(x) * width * 4, 0xFF).view(np.float32).reshape(len(x), width)
        if out is not None:
            result[:, : out.shape[1]] = out
        rows = self.prepare(x)  # held: the struct alone does not keep its memory
        self.table.gemm(
            ctypes.byref(self.matrix),
            first,
            last,
            ctypes.byref(rows.struct),
            len(x),
            result.ctypes.data,
            width,
            epilogue,
        )
        return result

    def multiplied_weights(self) -> npt.NDArray[np.float64]:
        """Return what int8 multiplies: rotated weights, float64 [out, padded in]."""
        padded = -(-self.in_features // 64) * 64
        data, scales = self.memory[:2]
        quads = data.reshape(-1, padded // 4, 16, 4).transpose(0, 2, 1, 3)
        quants = quads.reshape(-1, padded // 64, 64).astype(np.float64) - 128
        by_group = scales.view(np.float32).reshape(-1, padded // 64, 16).transpose(0, 2, 1)
        weights = quants * by_group.reshape(-1, padded // 64, 1)
        return weights.reshape(-1, padded)[: self.out_features]

    def unpack(self, row: int) -> Floats:
        """Return one row of the weight, float32 [in]."""
        out = np.full(self.in_features + 1, np.nan, np.float32)
        self.table.unpack_row(ctypes.byref(self.matrix), row, out.ctypes.data)
        assert np.isnan(out[-1])
        return out[:-1]
