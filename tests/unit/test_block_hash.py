"""core.block_hash: a prefix's name depends on all that fills its blocks, and on nothing else."""

from __future__ import annotations

import hashlib
import struct

from core.block_hash import ROOT, hash_blocks, namespace_of

TOKENS = list(range(100, 140))


def hashes(tokens: list[int] = TOKENS, **changed: object) -> list[bytes]:
    arguments = {"block_size": 16, "fingerprint": b"model", "namespace": b"", **changed}
    return list(hash_blocks(tokens, **arguments))  # pyright: ignore[reportArgumentType] - test table


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes(TOKENS[:n])) for n in (0, 15, 16, 31, 32, 40)] == [0, 0, 1, 1, 2, 2]


def test_encoding_is_the_documented_one() -> None:
    """Pins the bytes: workers of different versions must agree, or refuse by fingerprint."""
    encoded = ROOT + struct.pack("<16I", *TOKENS[:16]) + struct.pack("<II", 5, 2) + b"model" + b"ns"
    expected = hashlib.blake2b(encoded, digest_size=16).digest()
    assert hashes(TOKENS[:16], namespace=b"ns") == [expected]


def test_a_prefix_keeps_its_hashes() -> None:
    assert hashes(TOKENS)[:1] == hashes(TOKENS[:16])


def test_going_on_from_a_parent_gives_the_same_chain() -> None:
    first, second = hashes(TOKENS[:32])
    assert hashes(TOKENS[16:32], parent=first) == [second]


def test_equal_tokens_after_another_parent_differ() -> None:
    repeated = TOKENS[:16] * 2
    first, second = hashes(repeated)
    assert first != second


def test_everything_that_separates_caches_changes_every_hash() -> None:
    base = hashes()
    for changed in (
        hashes(fingerprint=b"other"),
        hashes(namespace=namespace_of(tenant="a")),
        hashes([*TOKENS[:0], 99, *TOKENS[1:]]),
        hashes(fingerprint=b"mode", namespace=b"l"),
    ):
        assert not set(base) & set(changed)


def test_namespace_parts_cannot_run_together() -> None:
    made = {
        namespace_of(),
        namespace_of(adapter="ab"),
        namespace_of(tenant="ab"),
        namespace_of(cache_salt="ab"),
        namespace_of(adapter="a", tenant="b"),
        namespace_of(tenant="a", cache_salt="b"),
    }
    assert len(made) == 6
    assert namespace_of() == b""
