"""Loads the native library, where it was built."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sysconfig
from pathlib import Path
from typing import Any

from core.environment import native_library
from core.errors import ModelError
from engine.kernels.cpu.abi import KernelTable, ModelShape, StepInputs, StepOutputs

ABI_VERSION = 4
_BUILT = Path(__file__).with_name("native" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))


def is_built() -> bool:
    """Whether the kernels were compiled at install."""
    return _path().exists()


def _path() -> Path:
    return native_library() or _BUILT


@functools.cache
def build_id() -> str:
    """Return 12 hex digits of this very build: what compilers and kernels may change, results and
    the order of packed weights, changes with it.

    Raises:
        ModelError: it was not built.
    """
    library()
    return hashlib.blake2b(_path().read_bytes(), digest_size=6).hexdigest()


@functools.cache
def library() -> Any:
    """Return the library's functions; each releases the GIL while it runs.

    Raises:
        ModelError: it was not built, or is another version's.
    """
    if not is_built():
        msg = "the native kernels were not built: install again where a C++17 compiler is found"
        raise ModelError(msg)
    loaded = ctypes.CDLL(str(_path()))
    version: int = loaded.dovetail_abi_version()
    if version != ABI_VERSION:
        msg = f"{_path().name} is of version {version}, this code of {ABI_VERSION}: install again"
        raise ModelError(msg)
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    for name, result, arguments in (
        ("dovetail_error", ctypes.c_char_p, []),
        ("dovetail_kernels", ctypes.POINTER(KernelTable), [number]),
        (
            "dovetail_runner_new",
            pointer,
            [ctypes.POINTER(KernelTable), ctypes.POINTER(ModelShape), number],
        ),
        ("dovetail_runner_delete", None, [pointer]),
        ("dovetail_forward", ctypes.c_bool, [pointer, ctypes.POINTER(StepInputs)]),
        ("dovetail_draws", pointer, [pointer]),
        ("dovetail_draw", ctypes.c_bool, [pointer, ctypes.POINTER(StepOutputs)]),
        ("dovetail_logits", ctypes.POINTER(ctypes.c_float), [pointer, number]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@functools.cache
def kernel_tables() -> tuple[Any, ...]:
    """Return the sets that this processor runs, best first: each a `KernelTable`."""
    tables: list[Any] = []
    while found := library().dovetail_kernels(len(tables)):
        tables.append(found.contents)
    return tuple(tables)
