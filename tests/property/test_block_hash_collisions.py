"""core.block_hash: two inputs share a block's hash iff they agree on all that led to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import hash_blocks, namespace_of

# Few values, so that equal parts are drawn often.
tokens = st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), max_size=9)
words = st.sampled_from([b"", b"a", b"b", b"ab"])
BLOCK = 3


@given(tokens, tokens, words, words, words, words)
def test_hashes_agree_exactly_on_the_common_prefix(
    mine: list[int], theirs: list[int], model: bytes, model2: bytes, space: bytes, space2: bytes
) -> None:
    ours = hash_blocks(mine, block_size=BLOCK, fingerprint=model, namespace=space)
    others = hash_blocks(theirs, block_size=BLOCK, fingerprint=model2, namespace=space2)
    for i, (a, b) in enumerate(zip(ours, others, strict=False)):
        end = (i + 1) * BLOCK
        same = mine[:end] == theirs[:end] and (model, space) == (model2, space2)
        assert (a == b) == same


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_namespaces_are_injective(a: tuple[str, str, str], b: tuple[str, str, str]) -> None:
    def encode(parts: tuple[str, str, str]) -> bytes:
        return namespace_of(adapter=parts[0], tenant=parts[1], cache_salt=parts[2])

    assert (encode(a) == encode(b)) == (a == b)
