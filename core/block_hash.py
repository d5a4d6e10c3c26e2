"""Chained block hashes: the name of a prefix, equal on every worker of one model.

hash(block i) = BLAKE2b-128(encode(parent hash, token ids of block i, fingerprint, namespace)).
The parent of the first block is 16 zero bytes. Fields are length-prefixed or of fixed width, so
that no two inputs have one encoding; token ids are little-endian uint32.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes."""

ROOT = BlockHash(bytes(16))


def namespace_of(*, adapter: str = "", tenant: str = "", cache_salt: str = "") -> bytes:
    """Encode what separates caches, each part length-prefixed; all empty gives ``b""``."""
    if not (adapter or tenant or cache_salt):
        return b""
    parts = [part.encode() for part in (adapter, tenant, cache_salt)]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def hash_blocks(
    token_ids: Sequence[int],
    *,
    block_size: int,
    fingerprint: bytes,
    namespace: bytes = b"",
    parent: BlockHash = ROOT,
) -> list[BlockHash]:
    """Return the hash of each full block of `token_ids`; a partial tail has none.

    Args:
        token_ids: ids from 0 to 2**32 - 1; the first belongs to the block after `parent`.
        block_size: tokens a block.
        fingerprint: the model's (weights and arithmetic, not the layout), any length.
        namespace: see `namespace_of`.
        parent: hash of the block before, for going on from a known prefix.
    """
    tail = struct.pack("<II", len(fingerprint), len(namespace)) + fingerprint + namespace
    hashes: list[BlockHash] = []
    for start, end in _full_blocks(len(token_ids), block_size):
        tokens = array("I", token_ids[start:end]).tobytes()
        digest = hashlib.blake2b(parent + tokens + tail, digest_size=16).digest()
        parent = BlockHash(digest)
        hashes.append(parent)
    return hashes


def _full_blocks(num_tokens: int, block_size: int) -> Iterable[tuple[int, int]]:
    return pairwise(range(0, num_tokens + 1, block_size))
