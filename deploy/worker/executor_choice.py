"""Which executor a worker runs: the one that is configured, or the best that can run the model."""

from __future__ import annotations

import logging
from typing import Literal

from core.config import EngineConfig
from core.errors import ConfigError, ModelError
from core.kv_layout import KvLayout
from engine.executor.native_model import native_tile_order
from engine.executor.native_program import lower
from engine.kernels.cpu.library import kernel_tables
from engine.models.llama import compile_program
from engine.models.spec import ModelSpec, kv_dtype_for, kv_layout_for

_log = logging.getLogger(__name__)

ExecutorName = Literal["native", "torch", "mock"]


def choose_executor(engine: EngineConfig, spec: ModelSpec) -> ExecutorName:
    """Resolve `engine.executor`; "auto" says why where it is not native.

    Raises:
        ConfigError: the native executor was asked for by name, and cannot run.
    """
    if engine.executor in ("torch", "mock"):
        return engine.executor
    why = _why_not_native(engine, spec)
    if why is None:
        return "native"
    if engine.executor == "native":
        msg = f"engine.executor = 'native': {why}"
        raise ConfigError(msg)
    _log.warning("the torch executor serves, slower than the native one: %s", why)
    return "torch"


def layout_for(executor: ExecutorName, engine: EngineConfig, spec: ModelSpec) -> KvLayout:
    """Return the layout of blocks that an executor other than the mock reads.

    Raises:
        ConfigError: it cannot read such blocks.
    """
    try:
        return _layout(executor, engine, spec)
    except ValueError as error:
        msg = f"engine.kv_dtype = {engine.kv_dtype!r} in the {executor} executor: {error}"
        raise ConfigError(msg) from None


def _layout(executor: ExecutorName, engine: EngineConfig, spec: ModelSpec) -> KvLayout:
    dtype = kv_dtype_for(engine.kv_dtype)
    order = native_tile_order(dtype) if executor == "native" else "token_major"
    return kv_layout_for(spec, dtype, engine.block_size, order)


def _why_not_native(engine: EngineConfig, spec: ModelSpec) -> str | None:
    if engine.device != "cpu":
        return f"it runs on CPUs, and engine.device is {engine.device!r}"
    try:
        kernel_tables()
        lower(spec, compile_program(spec))
        _layout("native", engine, spec)
    except (ModelError, ValueError) as error:
        return str(error)
    return None
