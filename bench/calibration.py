"""What this machine can do right now: a memory read and an int8 matrix product by our own threads.

Taken before and after each sample; a sample during which the machine changed is taken again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.timed_threads import TimedThreads
from engine.kernels.cpu.abi import Activations, Epilogue, Matrix, WeightType
from engine.kernels.cpu.library import kernel_tables

READ_BYTES = 128 << 20
_ROWS = 512
_PRODUCT = (3072, 576)
_CACHE_LINE = 64


class Speeds(NamedTuple):
    """Bytes a second read from memory; multiplications and additions a second of int8 numbers."""

    read: float
    int8: float

    def drift(self, other: Speeds) -> float:
        """Return how far the two are apart, as a share of the larger."""
        return max(1 - min(a, b) / max(a, b) for a, b in zip(self, other, strict=True))


class Calibration:
    """Measures with as many threads as the engines have."""

    def __init__(self, threads: int) -> None:
        self._threads = TimedThreads(threads)
        self._table = kernel_tables()[0]
        # One row of activations reads a float32 matrix once and computes next to nothing.
        self._read = _Product(self._table, WeightType.F32, READ_BYTES // 4 // 1024, 1024, 1)
        self._int8 = _Product(self._table, WeightType.INT8, *_PRODUCT, _ROWS)

    def measure(self) -> Speeds:
        """Take some 30 ms."""
        operations = 2.0 * _PRODUCT[0] * _PRODUCT[1] * _ROWS
        return Speeds(
            READ_BYTES / self._seconds(self._read.run, 1),
            8 * operations / self._seconds(self._int8.run, 8),
        )

    def read_seconds(self, num_bytes: float) -> float:
        """Return how long a plain read of so many bytes takes now."""
        return num_bytes * self._seconds(self._read.run, 2) / 2 / READ_BYTES

    def _seconds(self, work: Callable[[int, int], None], times: int) -> float:
        def run(thread: int) -> None:
            for _ in range(times):
                work(thread, self._threads.threads)

        return self._threads.seconds(run)


class _Product:
    """One matrix product of our kernels; threads take parts of its panels."""

    def __init__(
        self, table: Any, kind: WeightType, out_features: int, in_features: int, rows: int
    ) -> None:
        self._table, self._rows, self._out_features = table, rows, out_features
        sizes = (ctypes.c_int64 * 4)()
        table.packed_sizes(kind, out_features, in_features, ctypes.byref(sizes))
        self._memory = [_aligned(size) for size in sizes]
        group = 64 if kind is WeightType.INT8 else 1
        parts = [_address(memory) for memory in self._memory]
        self._matrix = Matrix(kind, out_features, in_features, group, *parts, None)
        values = np.ones((64, in_features), np.float32)
        for first in range(0, out_features, 64):
            count = min(64, out_features - first)
            table.pack_rows(ctypes.byref(self._matrix), _address(values), first, count, False)
        self._inputs = [_aligned(rows * in_features * size) for size in (4, 1, 1, 1, 1, 1)]
        self._inputs[0].view(np.float32)[:] = 1
        self._activations = Activations(
            _address(self._inputs[0]), in_features, *map(_address, self._inputs[1:])
        )
        for row in range(rows):
            table.prepare_row(ctypes.byref(self._matrix), ctypes.byref(self._activations), row)
        self._out = _aligned(rows * out_features * 4)

    def run(self, thread: int, threads: int) -> None:
        """Compute one thread's part."""
        panels = self._out_features // 16
        self._table.gemm(
            ctypes.byref(self._matrix),
            panels * thread // threads,
            panels * (thread + 1) // threads,
            ctypes.byref(self._activations),
            self._rows,
            _address(self._out),
            self._out_features,
            Epilogue.STORE,
        )


def _aligned(num_bytes: int) -> Any:
    memory = np.zeros(num_bytes + _CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % _CACHE_LINE
    return memory[first : first + num_bytes]


def _address(memory: Any) -> int:
    return memory.ctypes.data


def stolen_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the share of all processor time between two `cpu_ticks` that the host took away."""
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total else 0.0


def cpu_ticks(stat: Path = Path("/proc/stat")) -> tuple[int, int]:
    """Return (stolen, all) ticks of all processors since boot; see proc(5)."""
    fields = [int(value) for value in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return fields[7], sum(fields)
