"""The most that this processor multiplies a second, and what a prompt would take at that."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench.timed_threads import TimedThreads
from engine.models.spec import ModelSpec

_ROUNDS = 2_000_000
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-mavx512f", "-mavx512vnni")


class Peak(NamedTuple):
    """Multiplications and additions a second of all threads together."""

    int8: float
    f32: float

    def prefill_s(self, spec: ModelSpec, num_tokens: int) -> float:
        """Return the seconds of a prompt: linear layers at the peak of int8, attention at that of
        float32; one row of logits."""
        linear = 2.0 * (
            num_tokens * spec.num_layers * _weights_of_layer(spec) + _weights_of_logits(spec)
        )
        pairs = num_tokens * (num_tokens + 1) / 2
        attention = 4.0 * pairs * spec.num_layers * spec.num_heads * spec.head_dim
        return linear / self.int8 + attention / self.f32


class PeakMeter:
    """Measures it by a library of a few lines, compiled when it is made.

    Raises:
        OSError: no compiler.
        subprocess.CalledProcessError: it does not know the instructions.
    """

    def __init__(self, threads: int) -> None:
        self._threads = TimedThreads(threads)
        with tempfile.TemporaryDirectory() as directory:
            built = Path(directory) / "peak.so"
            source = Path(__file__).with_name("peak.cpp")
            subprocess.run(["g++", *_FLAGS, str(source), "-o", str(built)], check=True)  # noqa: S603, S607 - our own
            self._library = ctypes.CDLL(str(built))

    def measure(self) -> Peak:
        """Take some 40 ms."""
        return Peak(self._rate(self._library.peak_int8), self._rate(self._library.peak_f32))

    def _rate(self, function: Any) -> float:
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_int64]
        done: list[float] = []

        def work(_: int) -> None:
            done.append(function(_ROUNDS))

        seconds = self._threads.seconds(work)
        return sum(done) / seconds


def _weights_of_layer(spec: ModelSpec) -> int:
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads  # queries and the output; keys and values
    return spec.hidden_size * (heads * spec.head_dim + 3 * spec.intermediate_size)


def _weights_of_logits(spec: ModelSpec) -> int:
    return spec.hidden_size * spec.vocab_size
