"""The prefix index against plain sets, whatever the ledger says in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import BlockHash
from core.ids import Boot, WorkerId
from router.policy.prefix_index import PrefixIndex

# Three prefix chains of a radix tree: blocks are named by chain and depth.
CHAINS = [[BlockHash(bytes([chain, depth]) * 8) for depth in range(12)] for chain in range(3)]

_changes = st.lists(
    st.tuples(
        st.sampled_from(["snapshot", "delta", "forget", "restart"]),
        st.integers(0, 10),  # worker
        st.integers(0, 2),  # chain
        st.integers(0, 12),  # its new length
    ),
    max_size=60,
)


@given(_changes)
def test_match_equals_what_sets_say(changes: list[tuple[str, int, int, int]]) -> None:
    index = PrefixIndex()
    length: dict[WorkerId, list[int]] = {}
    boots: dict[WorkerId, int] = {}
    for kind, worker, chain, depth in changes:
        name = WorkerId(f"w{worker}")
        if kind == "forget":
            index.forget(name)
            length.pop(name, None)
            continue
        if kind == "restart":
            boots[name] = boots.get(name, 0) + 1
            length.pop(name, None)
        boot = Boot(str(boots.setdefault(name, 0)))
        held = length.setdefault(name, [0, 0, 0])
        old = held[chain]
        held[chain] = depth
        if kind == "snapshot":
            hashes = [h for c, n in zip(CHAINS, held, strict=True) for h in c[:n]]
            index.apply_snapshot(name, boot, hashes)
        else:
            index.apply_delta(name, boot, CHAINS[chain][:depth], CHAINS[chain][depth:old])
        assert index.num_blocks(name) == sum(held)
    for chain, hashes in enumerate(CHAINS):
        expected = {name: held[chain] for name, held in length.items() if held[chain]}
        assert index.match(hashes) == expected
    distinct = sum(max((held[c] for held in length.values()), default=0) for c in range(3))
    assert distinct <= len(index) <= 2 * distinct
