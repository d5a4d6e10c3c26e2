"""A cheap name for a set of weights: equal files give equal names, other weights another.

BLAKE2b-128 over every tensor's name, type and shape, its byte size, and `SAMPLE_BYTES` from its
start, middle and end: a fine-tune moves every tensor, so it cannot keep all of these bytes. Reading
the whole file would cost seconds; this costs a page or three a tensor.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable
from pathlib import Path

import msgspec

SAMPLE_BYTES = 64


class TensorInfo(msgspec.Struct, frozen=True):
    """Where one tensor lies in a file.

    Attributes:
        dtype: the file format's own name of the element type ("BF16", "Q4_1").
        shape: rows first, as torch has it.
        offset: bytes from the file's start.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def fingerprint(files: Iterable[tuple[Path, Iterable[TensorInfo]]], arithmetic: bytes) -> str:
    """Return 32 hex digits that name the weights in `files`; their paths do not matter.

    Args:
        files: each with its tensors.
        arithmetic: what else decides a token: sizes, epsilon, rotary base.
    """
    lines: list[bytes] = []
    for path, tensors in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for tensor in tensors:
                head = f"{tensor.name}|{tensor.dtype}|{tensor.shape}|{tensor.num_bytes}|"
                lines.append(head.encode() + _sample(data, tensor))
    digest = hashlib.blake2b(arithmetic, digest_size=16)
    for line in sorted(lines):  # independent of how tensors are spread over shards
        digest.update(len(line).to_bytes(4, "little") + line)
    return digest.hexdigest()


def _sample(data: mmap.mmap, tensor: TensorInfo) -> bytes:
    start, size = tensor.offset, tensor.num_bytes
    last = max(start, start + size - SAMPLE_BYTES)
    return b"".join(
        data[at : min(at + SAMPLE_BYTES, start + size)] for at in (start, (start + last) // 2, last)
    )
