"""A model bound to the native library: its ops, weights and rotations, and one step at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from core.errors import ModelError
from core.kv_layout import KvDtype, KvLayout
from engine.executor.native_model import NativeModel
from engine.executor.native_sampling import Wish, Wishes
from engine.kernels.cpu.abi import (
    DrawItem,
    KvLayer,
    KvType,
    ModelShape,
    Op,
    SignalCallback,
    StepInputs,
    StepOutputs,
)
from engine.kernels.cpu.library import library
from engine.models.rope_frequencies import attention_factor, rope_frequencies
from engine.models.spec import ModelSpec

Floats = npt.NDArray[np.float32]

_KV_TYPES: Final = {
    KvDtype.F32: KvType.F32,
    KvDtype.BF16: KvType.BF16,
    KvDtype.INT8: KvType.INT8,
}


class Drawn(NamedTuple):
    """What a step drew.

    Attributes:
        tokens: of all draws, in the order of the work items.
        firsts, ends: of each work item: the range of its draws that count, all but those after a
            wrong draft.
    """

    tokens: list[int]
    firsts: list[int]
    ends: list[int]


class NativeRunner:
    """Owns one `dovetail::Runner`, and everything that it points to.

    Args:
        spec: the model.
        model: its ops and weights.
        layout: of the pool's blocks.
        max_positions: positions that have rotations.
        num_threads: of a step, the caller's included.

    Raises:
        ModelError: the library refuses the program.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: NativeModel,
        layout: KvLayout,
        *,
        max_positions: int,
        num_threads: int,
    ) -> None:
        self._library = library()
        self._vocab_size = spec.vocab_size
        self._cos, self._sin = rotations(spec, max_positions)
        self._widths = np.array(model.program.register_widths, np.int32)
        self._kept: list[object] = [model]
        ops, layers = self._ops(model), _layers(layout)
        shape = ModelShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            max_positions=max_positions,
            cos=self._cos.ctypes.data,
            sin=self._sin.ctypes.data,
            register_widths=self._widths.ctypes.data,
            num_registers=len(self._widths),
            ops=ops,
            num_ops=len(ops),
            layers=layers,
            num_layers=len(layers),
            block_bytes=layout.block_bytes,
        )
        self._runner: int | None = self._library.dovetail_runner_new(
            ctypes.pointer(model.table), ctypes.byref(shape), num_threads
        )
        self._check(done=self._runner is not None)

    def _ops(self, model: NativeModel) -> Any:
        program, places, memory = model.program, model.places, model.memory
        matrices = {source: places.matrix(source, memory) for source in program.matrices}
        self._kept.append(matrices)
        ops = (Op * len(program.ops))()
        for native, op in zip(ops, program.ops, strict=True):
            native.kind, native.src, native.out = op.kind, op.src, op.out
            native.layer, native.epilogue, native.window = op.layer, op.epilogue, op.window
            native.is_rotary, native.eps = op.is_rotary, op.eps
            if op.matrix is not None:
                native.matrix = ctypes.pointer(matrices[op.matrix])
            if op.vector is not None:
                native.weight = places.vector(op.vector, memory)
        return ops

    def forward(self, inputs: StepInputs) -> None:
        """Run one forward pass; the logits of its selected rows stay until the next."""
        self._check(done=self._library.dovetail_forward(self._runner, ctypes.byref(inputs)))

    def refine(self, wishes: Sequence[Wish]) -> Wishes:
        """Tell the last pass' draws what is wished; keep the result until they are drawn."""
        items = DrawItem * (wishes[-1].draw + 1)
        return Wishes(items.from_address(self._library.dovetail_draws(self._runner)), wishes)

    def draw(self, num_work: int) -> Drawn:
        """Draw the tokens of the last pass, from logits that are overwritten; append them to the
        slots, and move these on.

        Args:
            num_work: work items of the pass.
        """
        outputs = StepOutputs()
        self._check(done=self._library.dovetail_draw(self._runner, ctypes.byref(outputs)))
        ranges = _integers(outputs.ranges, 2 * num_work)
        return Drawn(_integers(outputs.tokens, outputs.num_tokens), ranges[::2], ranges[1::2])

    def logits(self, num_rows: int) -> Floats:
        """Return a copy of the last pass' logits, float32 [num_rows, vocab_size]."""
        copied = np.empty((num_rows, self._vocab_size), np.float32)
        for row in range(num_rows):
            found = self._library.dovetail_logits(self._runner, row)
            copied[row] = np.ctypeslib.as_array(found, (self._vocab_size,))
        return copied

    def close(self) -> None:
        """Free everything; idempotent."""
        if self._runner is not None:
            self._library.dovetail_runner_delete(self._runner)
        self._runner = None
        self._kept.clear()

    def _check(self, *, done: bool) -> None:
        if not done:
            msg = f"the native library: {self._library.dovetail_error().decode()}"
            raise ModelError(msg)


def _integers(address: int | None, count: int) -> list[int]:
    return (ctypes.c_int32 * count).from_address(address)[:] if address is not None else []


def signal_callback(on_signal: Callable[[int], None] | None) -> Any:
    """Return what `StepInputs.on_signal` takes; keep it while steps run."""
    return SignalCallback(on_signal) if on_signal is not None else SignalCallback()


def rotations(spec: ModelSpec, max_positions: int) -> tuple[Floats, Floats]:
    """Return (cos, sin), each float32 [max_positions, head_dim / 2], by position."""
    frequencies = rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * frequencies
    factor = np.float32(attention_factor(spec.rope_scaling))
    exact = angles.astype(np.float64)  # numpy's own float32 functions are off by a bit or two
    cos, sin = np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32)
    return cos * factor, sin * factor


def _layers(layout: KvLayout) -> Any:
    layers = (KvLayer * layout.num_layers)()
    for native, layer in zip(layers, layout.layers, strict=True):
        native.base = layer.offset
        native.block_stride = layout.block_bytes
        native.head_stride, native.value_offset = layer.head_stride, layer.kv_stride
        native.scale_offset = max(0, layer.scale_offset)
        native.type = _KV_TYPES[layer.dtype]
        native.block_size = layout.block_size
        native.num_kv_heads, native.head_dim = layout.num_kv_heads, layout.head_dim
    return layers
