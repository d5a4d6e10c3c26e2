"""A program bound to its weights and kernels: one callable an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.interface import Kernels
from engine.kernels.paged_kv import PagedKv
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


class Inputs(NamedTuple):
    """One forward pass.

    Attributes:
        token_ids: int64 [tokens].
        selected: int64 rows whose logits are wanted; None where there are none.
        signal: called with the layer when a `Signal` is reached.
        on_hidden: called when all rows are computed and before the selected ones' logits, with a
            function from rows, int64 [rows], to their logits, float32 [rows, vocab_size].
    """

    token_ids: Tensor
    batch: AttentionBatch
    pool: PagedKv
    selected: Tensor | None
    signal: Callable[[int], None] | None
    on_hidden: Callable[[Callable[[Tensor], Tensor]], None] | None = None


class Outputs(NamedTuple):
    """Of the selected rows: float32 [rows, hidden_size] and [rows, vocab_size]."""

    hidden: Tensor
    logits: Tensor


Registers = dict[str, Tensor]
Compute = Callable[[Registers, Inputs], Tensor | None]


class BoundOp(NamedTuple):
    """An op with its weights: what `compute` returns goes into register `out`, if anything."""

    out: str
    compute: Compute


class CompiledProgram:
    """Runs a program's ops in order.

    Args:
        program: what to run.
        kernels: how.
        weights: by name; packed here, once. The program keeps no other copy.
        device: where embeddings and norms are kept.
    """

    def __init__(
        self,
        program: Program,
        kernels: Kernels,
        weights: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._program = program
        first_selected = next(
            index for index, op in enumerate(program.ops) if isinstance(op, SelectRows)
        )
        bind = _Binder(kernels, weights, device)
        bound = [bind(op) for op in program.ops]
        self._body, self._head = bound[:first_selected], bound[first_selected:]

    def run(self, inputs: Inputs) -> Outputs | None:
        """Run all ops; without selected rows, stop when the cache is written."""
        registers: Registers = {}
        _run(self._body, registers, inputs)
        if inputs.on_hidden is not None:
            inputs.on_hidden(lambda rows: self._outputs(registers, inputs, rows).logits)
        if inputs.selected is None:
            return None
        return self._outputs(registers, inputs, inputs.selected)

    def _outputs(self, registers: Registers, inputs: Inputs, rows: Tensor) -> Outputs:
        own = dict(registers)
        _run(self._head, own, inputs._replace(selected=rows))
        return Outputs(own[self._program.hidden], own[self._program.logits])


def _run(ops: Sequence[BoundOp], registers: Registers, inputs: Inputs) -> None:
    for out, compute in ops:
        result = compute(registers, inputs)
        if result is not None:
            registers[out] = result


class _Binder:
    """Turns ops into closures over kernels and weights."""

    def __init__(
        self, kernels: Kernels, weights: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self._kernels = kernels
        self._weights = weights
        self._device = device
        self._vectors: dict[str, Tensor] = {}

    def __call__(self, op: Op) -> BoundOp:
        match op:
            case Embed() | Norm() | Linear() | QkNorm() | Logits():
                return BoundOp(op.out, self._weighted(op))
            case RopeKvWrite() | Attention() | Activation():
                return BoundOp(op.out, self._unweighted(op))
            case Add() | SelectRows():
                return BoundOp(op.out, _on_rows(op))
            case Signal(layer=layer):
                return BoundOp("", _signal(layer))

    def _weighted(self, op: Embed | Norm | Linear | QkNorm | Logits) -> Compute:
        kernels = self._kernels
        match op:
            case Embed(weight=name):
                table = self._vector(name)
                return lambda _, inputs: kernels.embed(inputs.token_ids, table)
            case Norm(src=src, weight=name, eps=eps):
                scale = self._vector(name)
                return lambda registers, _: kernels.rms_norm(registers[src], scale, eps)
            case Linear(src=src, weights=names, biases=biases):
                parts = [self._weights[name] for name in names]
                matrix = kernels.pack(parts, [self._weights[name] for name in biases])
                return lambda registers, _: matrix(registers[src])
            case QkNorm(src=src, eps=eps):
                scales = self._head_scales(op)
                return lambda registers, _: kernels.qk_norm(registers[src], scales, eps)
            case Logits(src=src, weight=name):
                tied = self._vectors.get(name)  # not read from the file twice
                projection = kernels.pack_logits(self._weights[name] if tied is None else tied)
                return lambda registers, _: projection(registers[src])

    def _head_scales(self, op: QkNorm) -> Tensor:
        """Return float32 [heads + kv_heads, head_dim]."""
        query, key = self._vector(op.query_weight), self._vector(op.key_weight)
        return torch.cat((query.expand(op.num_heads, -1), key.expand(op.num_kv_heads, -1)))

    def _unweighted(self, op: RopeKvWrite | Attention | Activation) -> Compute:
        kernels = self._kernels
        match op:
            case RopeKvWrite(src=src, layer=layer, rotary=rotary):
                return lambda registers, inputs: kernels.rope_kv_write(
                    registers[src], layer, inputs.pool, inputs.batch, rotary=rotary
                )
            case Attention(src=src, layer=layer, window=window):
                return lambda registers, inputs: kernels.attention(
                    registers[src], layer, inputs.pool, inputs.batch, window
                )
            case Activation(src=src, kind="silu"):
                return lambda registers, _: kernels.gated_silu(registers[src])

    def _vector(self, name: str) -> Tensor:
        """Return a float32 weight that is used unpacked, shared by all ops that name it."""
        if name not in self._vectors:
            self._vectors[name] = self._weights[name].to(self._device, torch.float32)
        return self._vectors[name]


def _on_rows(op: Add | SelectRows) -> Compute:
    match op:
        case Add(src=src, out=out):
            return lambda registers, _: registers[out].add_(registers[src])
        case SelectRows(src=src):
            return lambda registers, inputs: registers[src][inputs.selected]


def _signal(layer: int) -> Compute:
    def signal(_: Registers, inputs: Inputs) -> None:
        if inputs.signal is not None:
            inputs.signal(layer)

    return signal
