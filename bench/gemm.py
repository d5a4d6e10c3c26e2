"""The native linear layers alone: multiply-adds a second on one core, by weight type and rows.

One and eight rows read weights that no cache holds, as a decode step does; 512 rows are a prefill's
chunk. The shape is SmolLM2's fused Q, K and V. Figures are the fastest of many short calls, since a
neighbour can only slow them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from bench.figures import Figure, figure
from core.clock import SystemClock
from engine.kernels.cpu.abi import Activations, Epilogue, Matrix, WeightType
from engine.kernels.cpu.library import kernel_tables

_OUT, _IN = 960, 576
_GROUP: Final = {WeightType.F32: 1, WeightType.BF16: 2, WeightType.INT8: 64}  # 32 for the rest
_COLD_BYTES: Final = 100_000_000  # of copies of the weights: more than a cache
_CALLS: Final = 300


def run() -> Iterator[Figure]:
    """Measure the best instruction set that the processor runs."""
    table = kernel_tables()[0]
    for weight_type in WeightType:
        for num_rows in (1, 8, 512):
            samples = [_measure(table, weight_type, num_rows) for _ in range(3)]
            name = f"gemm.{weight_type.name.lower()}.{num_rows}"
            yield figure(name, samples, "Gop/s", against=f"{_OUT} x {_IN}, one thread")


def _measure(table: Any, weight_type: WeightType, num_rows: int) -> float:
    """Return the fastest call's 10^9 operations a second, two a multiply-add."""
    sizes = (ctypes.c_int64 * 4)()
    table.packed_sizes(weight_type, _OUT, _IN, ctypes.byref(sizes))
    copies = 1 if num_rows > 8 else _COLD_BYTES // sum(sizes) + 1
    layers, memory = _layers(weight_type, list(sizes), copies)
    rows, held = _rows(num_rows)
    out = np.empty((num_rows, _OUT), np.float32)
    for row in range(num_rows):
        table.prepare_row(ctypes.byref(layers[0]), ctypes.byref(rows), row)
    clock, best = SystemClock(), float("inf")
    for call in range(_CALLS if num_rows <= 8 else _CALLS // 10):
        layer = ctypes.byref(layers[call % copies])
        began = clock.now()
        table.gemm(
            layer,
            0,
            _OUT // 16,
            ctypes.byref(rows),
            num_rows,
            out.ctypes.data,
            _OUT,
            Epilogue.STORE,
        )
        best = min(best, clock.now() - began)
    del memory, held  # the structs only point to them
    return 2e-9 * num_rows * _OUT * _IN / best


def _layers(
    weight_type: WeightType, sizes: list[int], copies: int
) -> tuple[list[Matrix], list[Any]]:
    """Return layers of zeros, written once so that each has pages of its own, and their memory."""
    memory = [np.zeros(size + 64, np.uint8) for _ in range(copies) for size in sizes]
    for part in memory:
        part.fill(0)
    at = [part.ctypes.data + -part.ctypes.data % 64 for part in memory]
    layers = [
        Matrix(
            type=weight_type,
            out_features=_OUT,
            in_features=_IN,
            group=_GROUP.get(weight_type, 32),
            data=at[i],
            scales=at[i + 1],
            minimums=at[i + 2],
            sums=at[i + 3],
            bias=None,
        )
        for i in range(0, len(at), 4)
    ]
    return layers, memory


def _rows(num_rows: int) -> tuple[Activations, list[Any]]:
    """Return rows of ones, and their memory."""
    memory: list[Any] = [
        np.ones((num_rows, _IN), np.float32),
        np.zeros((num_rows, _IN), np.int8),
    ]
    memory += [np.zeros((num_rows, _IN // 32), np.int32) for _ in range(3)]
    memory.append(np.zeros(num_rows, np.uint64))
    values, quants, scales, sums, middles, centred = (part.ctypes.data for part in memory)
    struct = Activations(values, _IN, quants, scales, sums, middles, centred)
    return struct, memory
