"""A model's program lowered to the native library's ops: numbered registers, fused epilogues.

    Linear -> delta, Add(delta -> residual)      one product that adds to the residual
    Linear -> gate_up, Activation                one product whose panels alternate gate and up
    RopeKvWrite(qkv -> queries)                  in place: both names are one register

Values only: which weights an op reads, not where they are.
"""

from __future__ import annotations

from typing import Final

import msgspec

from core.errors import ModelError
from engine.kernels.cpu.abi import Epilogue, OpKind
from engine.models.program import (
    Activation,
    Add,
    Attention,
    Embed,
    Linear,
    Logits,
    Norm,
    Op,
    Program,
    QkNorm,
    RopeKvWrite,
    SelectRows,
    Signal,
)
from engine.models.spec import ModelSpec
from engine.models.tensor_shapes import expected_shapes

PANEL: Final = 16
"""Outputs that a packed matrix keeps side by side."""


class MatrixSource(msgspec.Struct, frozen=True):
    """The weights of one packed matrix.

    Attributes:
        parts: each weight's name and its first row.
        biases: names, one a part; or none.
        out_features: rows, those between padded halves included.
        interleaved: two halves, gate and up, whose panels alternate.
    """

    parts: tuple[tuple[str, int], ...]
    biases: tuple[str, ...]
    out_features: int
    in_features: int
    interleaved: bool = False


class VectorSource(msgspec.Struct, frozen=True):
    """float32 weights that follow each other, each repeated so many times."""

    parts: tuple[tuple[str, int], ...]


class NativeOp(msgspec.Struct, frozen=True):
    """One op of `csrc/step.h`; registers that it does not have are 0."""

    kind: OpKind
    src: int = 0
    out: int = 0
    layer: int = 0
    epilogue: Epilogue = Epilogue.STORE
    window: int = 0
    is_rotary: bool = False
    eps: float = 0.0
    matrix: MatrixSource | None = None
    vector: VectorSource | None = None


class NativeProgram(msgspec.Struct, frozen=True):
    """All ops, and the width of each register."""

    ops: tuple[NativeOp, ...]
    register_widths: tuple[int, ...]

    @property
    def matrices(self) -> list[MatrixSource]:
        """Each matrix once, in the order of its first use."""
        return list(dict.fromkeys(op.matrix for op in self.ops if op.matrix is not None))

    @property
    def centred_matrices(self) -> frozenset[MatrixSource]:
        """Those whose inputs the kernels round with more care (`csrc/quantize.inl`): of the logits,
        and of what is stored as it comes (queries, keys, values). Measured, their inputs' rounding
        costs the most accuracy for their size."""
        return frozenset(
            op.matrix
            for op in self.ops
            if op.matrix is not None
            and (
                op.kind is OpKind.LOGITS
                or (op.kind is OpKind.LINEAR and op.epilogue is Epilogue.STORE)
            )
        )

    @property
    def vectors(self) -> list[VectorSource]:
        """Likewise."""
        return list(dict.fromkeys(op.vector for op in self.ops if op.vector is not None))


def lower(spec: ModelSpec, program: Program) -> NativeProgram:
    """Return the same computation in the library's ops.

    Raises:
        ModelError: the program has something that the library cannot run.
    """
    lowering = _Lowering(spec)
    ops = list(program.ops)
    while ops:
        del ops[: lowering.take(ops[0], ops[1] if len(ops) > 1 else None)]
    kinds = [op.kind for op in lowering.ops[-3:]]
    if kinds != [OpKind.SELECT_ROWS, OpKind.NORM, OpKind.LOGITS]:
        raise _unsupported(program.ops[-1], "the program must end with SelectRows, Norm, Logits")
    return NativeProgram(tuple(lowering.ops), tuple(lowering.widths))


class _Lowering:
    """Registers and ops so far."""

    def __init__(self, spec: ModelSpec) -> None:
        self.ops: list[NativeOp] = []
        self.widths: list[int] = []
        self._spec = spec
        self._shapes = expected_shapes(spec)
        self._registers: dict[str, int] = {}

    def take(self, op: Op, following: Op | None) -> int:
        """Lower an op, or two that are one; return how many."""
        match op:
            case Linear():
                return self._linear(op, following)
            case Embed() | Norm() | QkNorm() | Logits():
                self._weighted(op)
            case RopeKvWrite() | Attention() | SelectRows() | Signal():
                self._unweighted(op)
            case Add() | Activation():
                raise _unsupported(op, "it must follow the product that it belongs to")
        return 1

    def _linear(self, op: Linear, following: Op | None) -> int:
        src = self._registers[op.src]
        match following:
            case Add(src=op.out, out=out):
                self._add_product(op, src, out, Epilogue.ADD)
            case Activation(src=op.out, kind="silu", out=out) if len(op.weights) == 2:
                self._add_product(op, src, out, Epilogue.GATED_SILU)
            case _:
                self._add_product(op, src, op.out, Epilogue.STORE)
                return 1
        return 2

    def _add_product(self, op: Linear, src: int, out: str, epilogue: Epilogue) -> None:
        matrix = self._matrix(op.weights, op.biases, interleaved=epilogue is Epilogue.GATED_SILU)
        width = matrix.out_features
        if matrix.interleaved:
            width = self._shapes[op.weights[0]][0]
        self.ops.append(
            NativeOp(
                OpKind.LINEAR, src, self._register(out, width), epilogue=epilogue, matrix=matrix
            )
        )

    def _weighted(self, op: Embed | Norm | QkNorm | Logits) -> None:
        spec = self._spec
        match op:
            case Embed():
                out = self._register(op.out, spec.hidden_size)
                matrix = self._matrix((op.weight,), (), interleaved=False)
                self.ops.append(NativeOp(OpKind.EMBED, out=out, matrix=matrix))
            case Norm():
                src = self._registers[op.src]
                out = self._register(op.out, self.widths[src])
                vector = VectorSource(((op.weight, 1),))
                self.ops.append(NativeOp(OpKind.NORM, src, out, eps=op.eps, vector=vector))
            case QkNorm():
                src = self._registers[op.src]
                self._alias(op.out, src)
                weights = ((op.query_weight, op.num_heads), (op.key_weight, op.num_kv_heads))
                self.ops.append(
                    NativeOp(OpKind.QK_NORM, src, src, eps=op.eps, vector=VectorSource(weights))
                )
            case Logits():
                matrix = self._matrix((op.weight,), (), interleaved=False)
                self.ops.append(NativeOp(OpKind.LOGITS, self._registers[op.src], matrix=matrix))

    def _unweighted(self, op: RopeKvWrite | Attention | SelectRows | Signal) -> None:
        match op:
            case RopeKvWrite():
                src = self._registers[op.src]
                self._alias(op.out, src)
                self.ops.append(
                    NativeOp(OpKind.ROPE_KV_WRITE, src, src, op.layer, is_rotary=op.rotary)
                )
            case Attention():
                src = self._registers[op.src]
                out = self._register(op.out, self._spec.num_heads * self._spec.head_dim)
                window = op.window or 0
                self.ops.append(NativeOp(OpKind.ATTENTION, src, out, op.layer, window=window))
            case SelectRows():
                src = self._registers[op.src]
                self._alias(op.out, src)
                self.ops.append(NativeOp(OpKind.SELECT_ROWS, src, src))
            case Signal():
                self.ops.append(NativeOp(OpKind.SIGNAL, layer=op.layer))

    def _register(self, name: str, width: int) -> int:
        if name not in self._registers:
            self._registers[name] = len(self.widths)
            self.widths.append(width)
        number = self._registers[name]
        self.widths[number] = max(self.widths[number], width)
        return number

    def _alias(self, name: str, number: int) -> None:
        self._registers[name] = number

    def _matrix(
        self, weights: tuple[str, ...], biases: tuple[str, ...], *, interleaved: bool
    ) -> MatrixSource:
        parts: list[tuple[str, int]] = []
        first = 0
        for name in weights:
            parts.append((name, first))
            num_rows = self._shapes[name][0]
            first += -(-num_rows // PANEL) * PANEL if interleaved else num_rows
        in_features = self._shapes[weights[0]][1]
        return MatrixSource(tuple(parts), biases, first, in_features, interleaved)


def _unsupported(op: Op, why: str) -> ModelError:
    return ModelError(f"the native executor cannot run {type(op).__name__}: {why}")
