"""kv_transfer.transports_seen: it changes when something new was seen, not with every write."""

from __future__ import annotations

from kv_transfer.transports_seen import TransportsSeen


def test_what_is_less_telling_changes_nothing() -> None:
    seen = TransportsSeen()
    assert seen.text == ""
    assert [seen.add(t) for t in ("ucx", "ucx", "ucx (cma)", "ucx", "ucx (cma)")] == [
        True,
        False,
        True,
        False,
        False,
    ]
    assert seen.text == "ucx (cma)"


def test_peers_differ() -> None:
    seen = TransportsSeen()
    for transport in ("ucx (tcp)", "ucx (cma)", "ucx (tcp)"):
        seen.add(transport)
    assert seen.text == "ucx (cma) + ucx (tcp)"
