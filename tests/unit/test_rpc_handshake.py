"""What must agree before two processes talk."""

from __future__ import annotations

import pytest

from control_plane.rpc.handshake import difference
from core.ids import Boot
from core.worker_record import Hello

WORKER = Hello("worker", "w", Boot("b1"), model_fingerprint="m", layout="l")


@pytest.mark.parametrize(
    "opener",
    [
        Hello("router", "r", Boot("x")),
        Hello("router", "r", Boot("x"), expected_boot="b1", model_fingerprint="m"),
        Hello("router", "r", Boot("x"), layout="another: routers hold no blocks"),
        Hello("decode", "d", Boot("x"), model_fingerprint="m", layout="l"),
    ],
)
def test_these_agree(opener: Hello) -> None:
    assert difference(opener, WORKER) is None


def test_the_first_difference_is_named_with_both_values() -> None:
    opener = Hello("decode", "d", Boot("x"), model_fingerprint="m", layout="k")
    assert difference(opener, WORKER) == "layout: the opener has 'k', the worker 'l'"


def test_only_workers_answer() -> None:
    opener = Hello("router", "r", Boot("x"))
    assert difference(opener, opener) == "kind: expected 'worker', this is 'router'"
