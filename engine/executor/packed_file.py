"""A file of packed weights, which all workers of a machine map: one copy in memory, packed once.

    CACHE/MODEL.vVERSION        the bytes, and nothing else
    CACHE/MODEL.vVERSION.PID    one that is being written

A file gets its name when it is whole, so whoever finds it may map it. Without a cache, or where it
cannot be written, a process packs into memory of its own.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Pack = Callable[[Bytes], None]
"""Fills zeroed memory."""


class PackedName(NamedTuple):
    """What packed bytes depend on.

    Attributes:
        model: weights, how they are kept, and the instruction set.
        version: of the packing code and the library; no dots.
    """

    model: str
    version: str


def open_packed(cache: Path | None, name: PackedName, num_bytes: int, pack: Pack) -> Bytes:
    """Return packed weights, uint8 [num_bytes], from a multiple of 4,096 bytes on.

    Args:
        cache: a directory, made where it is missing; None: no file is read or written.
        name: of the file.
        num_bytes: of the packed weights.
        pack: packs them, where no file has them yet.
    """
    if cache is not None:
        path = cache / f"{name.model}.v{name.version}"
        try:
            if not _is_whole(path, num_bytes):
                _write(path, num_bytes, pack)
                _remove_older(path, name.model)
            return _mapped(path, num_bytes)
        except (OSError, ValueError) as error:  # mmap's own is a ValueError
            _log.warning("packed weights are not kept for the next start: %s", error)
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    packed = np.frombuffer(memory, np.uint8)
    pack(packed)
    return packed


def _is_whole(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _mapped(path: Path, num_bytes: int) -> Bytes:
    with path.open("rb") as file:
        # Populated at once, or the first steps would fault every page in.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(file.fileno(), num_bytes, flags, mmap.PROT_READ)
    return np.frombuffer(mapped, np.uint8)


def _write(path: Path, num_bytes: int, pack: Pack) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with fresh.open("w+b") as file:
            # Where the disk is full this says so; a write to a mapped hole would end the process.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            pack(np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8))
        if not _is_whole(path, num_bytes):  # else a faster worker's copy serves both
            fresh.replace(path)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def _remove_older(path: Path, model: str) -> None:
    """Remove what other versions packed of this model, and what processes left that died at it."""
    for other in path.parent.glob(f"{model}.v*"):
        version, _, pid = other.name.removeprefix(f"{model}.").partition(".")
        is_current = other.with_name(f"{model}.{version}") == path
        if not is_current or (pid and not Path("/proc", pid).exists()):
            other.unlink(missing_ok=True)
