"""The values of the cache ledger's keys: MessagePack, with hashes one after the other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from core.block_hash import BlockHash
from core.ids import Boot

HASH_BYTES = 16

PART_HASHES = 60_000
"""Hashes in one part of a snapshot: 0.96 MB, where etcd refuses requests over 1.5 MiB."""


class CacheCounters(msgspec.Struct, frozen=True):
    """Totals since the worker's boot.

    Attributes:
        hits: prompt tokens by source (local_cache, transferred, ...), api.md's names.
        preemptions: sequences that lost their blocks.
    """

    hits: dict[str, int] = {}
    preemptions: int = 0


class Delta(msgspec.Struct, frozen=True):
    """What changed from `seq - 1` to `seq`; no hash is in both."""

    boot: Boot
    seq: int
    stored: bytes
    evicted: bytes
    counters: CacheCounters


class Head(msgspec.Struct, frozen=True):
    """Which snapshot holds, and up to which delta: it has everything up to `seq`, inclusive.

    Attributes:
        generation: names the snapshot's parts; never reused, also not by another boot.
    """

    boot: Boot
    generation: str
    seq: int
    num_parts: int
    counters: CacheCounters


class Part(NamedTuple):
    """A part of a snapshot, or (None) that it was deleted."""

    generation: str
    number: int
    joined: bytes | None


class HeadGone(NamedTuple):
    """The head was deleted, and the ledger with it."""


Record = Head | HeadGone | Delta | Part


def decode(name: str, value: bytes | None) -> Record | None:
    """Return what a key of a ledger says; None where it says nothing (a deleted delta).

    Args:
        name: the key, from below the worker's.
        value: None: it was deleted.

    Raises:
        ValueError: not a key or not a value of this protocol version.
    """
    match name.split("/"):
        case ["head"]:
            return HeadGone() if value is None else msgspec.msgpack.decode(value, type=Head)
        case ["delta"]:
            return None if value is None else _decode_delta(value)
        case ["snap", generation, number]:
            _check_whole(value or b"")
            return Part(generation, int(number), value)
        case _:
            msg = f"{name!r} is no key of a ledger"
            raise ValueError(msg)


def _decode_delta(value: bytes) -> Delta:
    delta = msgspec.msgpack.decode(value, type=Delta)
    _check_whole(delta.stored)
    _check_whole(delta.evicted)
    return delta


def _check_whole(joined: bytes) -> None:
    """Refuse here what `split_hashes` could not split: nobody expects it to fail later."""
    if len(joined) % HASH_BYTES:
        msg = f"{len(joined)} bytes are no list of {HASH_BYTES}-byte hashes"
        raise ValueError(msg)


def join_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """Return the hashes one after the other."""
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[BlockHash]:
    """Return the hashes again.

    Raises:
        ValueError: not a whole number of them.
    """
    _check_whole(joined)
    starts = range(0, len(joined), HASH_BYTES)
    return [BlockHash(joined[start : start + HASH_BYTES]) for start in starts]


def snapshot_parts(hashes: Sequence[BlockHash]) -> Iterator[bytes]:
    """Yield the values of a snapshot's parts, each made when it is asked for (1.5 ms); a snapshot
    of nothing has none."""
    for start in range(0, len(hashes), PART_HASHES):
        yield join_hashes(hashes[start : start + PART_HASHES])
