"""A model as the native library runs it: its lowered program and packed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from core.kv_layout import KvDtype, TileOrder
from engine.executor.native_program import NativeProgram, lower
from engine.executor.native_weights import (
    PACKING_VERSION,
    Bytes,
    WeightLayout,
    WeightsKind,
    choose_kind,
)
from engine.executor.packed_file import PackedName, open_packed
from engine.kernels.cpu.library import build_id, kernel_tables
from engine.models.llama import compile_program
from engine.models.spec import ModelSpec
from engine.models.tensor_shapes import expected_shapes
from engine.models.weights import open_weights


class NativeModel(msgspec.Struct, frozen=True):
    """What a runner needs of a model.

    Attributes:
        places: where the weights are in `memory`.
        memory: uint8, read-only.
        kind: how matrices are kept.
        table: the kernels that it is packed for.
    """

    program: NativeProgram
    places: WeightLayout
    memory: Bytes
    kind: WeightsKind
    table: Any


def native_tile_order(dtype: KvDtype) -> TileOrder:
    """Return the order of keys that the kernels read."""
    return "quads" if dtype is KvDtype.INT8 else "pairs"


def load_model(
    spec: ModelSpec,
    path: Path,
    choice: str = "auto",
    *,
    cache: Path | None = None,
    table: Any = None,
) -> NativeModel:
    """Lower the program and pack the weights, or map those that were packed before.

    Args:
        spec: what `read_spec(path)` returned.
        path: a Hugging Face directory or a GGUF file.
        choice: `engine.weights`.
        cache: a directory for packed weights; None: they are packed into this process' memory.
        table: the kernels, one of `kernel_tables`; by default the best here.

    Raises:
        ModelError: the weights do not fit the spec, or the library is missing or cannot run the
            program.
    """
    table = kernel_tables()[0] if table is None else table
    program = lower(spec, compile_program(spec))
    weights = open_weights(spec, path)
    dtypes = {name: tensor.dtype for name, tensor in weights.tensors.items()}
    kind = choose_kind(choice, dtypes)
    places = WeightLayout(program, kind, dtypes, expected_shapes(spec), table)
    name = PackedName(
        model=f"{spec.fingerprint}.{kind}.{table.name.decode()}",
        version=f"{PACKING_VERSION}-{build_id()}",
    )
    memory = open_packed(cache, name, places.num_bytes, lambda to: places.pack(weights, to))
    return NativeModel(program, places, memory, kind, table)
