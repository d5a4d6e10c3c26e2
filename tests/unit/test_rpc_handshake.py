"""What must agree before two processes talk."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from control_plane.rpc.handshake import LAYOUT_FIELDS, difference, reason_of
from core.ids import Boot
from core.kv_layout import KvDtype, block_major
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


def test_a_layout_differs_in_a_field() -> None:
    made = block_major(
        model="m", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype=KvDtype.BF16
    )
    finer = replace(made, block_size=8).summary()
    opener = Hello("decode", "d", Boot("x"), layout=finer)
    worker = replace(WORKER, layout=made.summary())
    assert difference(opener, worker) == "layout.block_size: the opener has '8', the worker '16'"


def test_whatever_differs_has_a_reason_of_its_own_and_a_peers_words_have_none() -> None:
    layout = block_major(
        model="m", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype=KvDtype.BF16
    )
    fields = [field.partition("=")[0] for field in layout.summary().split()]
    assert tuple(fields) == LAYOUT_FIELDS
    for name in fields:
        assert reason_of(f"layout.{name}: 1 here") == f"layout.{name}"
    assert reason_of("layout.anything: x") == "other"
    assert reason_of("") == "other"


def test_only_workers_answer() -> None:
    opener = Hello("router", "r", Boot("x"))
    assert difference(opener, opener) == "kind: expected 'worker', this is 'router'"
