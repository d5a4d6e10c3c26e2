"""What etcd holds and takes, as plain values. Pure."""

from __future__ import annotations

import msgspec


class KeyValue(msgspec.Struct, frozen=True):
    """One key as etcd holds it.

    Attributes:
        mod_revision: the revision of its last write.
        lease: id of the lease that it hangs on; 0: none.
    """

    key: str
    value: bytes
    mod_revision: int
    lease: int = 0


class Deleted(msgspec.Struct, frozen=True):
    """A key that is gone: deleted, or its lease ended."""

    key: str
    mod_revision: int


class Listing(msgspec.Struct, frozen=True):
    """All keys of a prefix at one revision, in the order of their names."""

    revision: int
    items: tuple[KeyValue, ...]


class Put(msgspec.Struct, frozen=True):
    """A write within a transaction."""

    key: str
    value: bytes
    lease: int = 0


class Newest(msgspec.Struct, frozen=True):
    """What a prefix looks like from afar: the last write among its living keys, and how many."""

    revision: int
    mod_revision: int
    num_keys: int


class Look(msgspec.Struct, frozen=True):
    """One key, or its absence, at a revision of all of etcd."""

    revision: int
    item: KeyValue | None
