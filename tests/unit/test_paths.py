"""kv_transfer.paths: when a worker says that it can move no KV."""

from __future__ import annotations

from itertools import pairwise

from core.ids import Boot
from kv_transfer.paths import FIRST_S, LIMIT_S, Paths

A, B = Boot("a"), Boot("b")


def test_a_worker_fails_when_the_path_to_every_peer_does_and_one_that_works_is_enough() -> None:
    paths = Paths()
    assert paths.failure == "", "nothing is known"
    paths.worked(A)
    paths.failed(B, "reset", 0.0)
    assert (paths.failure, paths.is_avoided(0.0)) == ("", False)
    paths.failed(A, "no route", 0.0)
    assert paths.failure == "no KV moves to or from any of 2 peers: no route"
    assert paths.is_avoided(0.0)
    paths.worked(B)
    assert (paths.failure, paths.is_avoided(0.0)) == ("", False)


def test_the_dead_say_nothing_of_it() -> None:
    paths = Paths()
    paths.failed(A, "reset", 0.0)
    paths.forget(A)
    paths.forget(B)
    assert paths.failure == ""
    paths.failed(A, "reset", 0.0)
    paths.worked(B)
    paths.forget(B)
    assert "1 peers: reset" in paths.failure


def test_it_is_left_alone_for_longer_each_time_until_a_path_works() -> None:
    paths, now, waits = Paths(), 0.0, list[float]()
    for _ in range(8):
        paths.failed(A, "reset", now)
        paths.failed(A, "reset", now)  # of the same trial
        until = next(now + s / 2 for s in range(1000) if not paths.is_avoided(now + s / 2))
        assert paths.failure, "tried again, and not ready for that"
        waits.append(until - now)
        now = until
    assert (waits[0], waits[-1]) == (FIRST_S, LIMIT_S)
    assert all(later == min(2 * wait, LIMIT_S) for wait, later in pairwise(waits))
    paths.worked(A)
    paths.failed(A, "reset", now)
    assert not paths.is_avoided(now + FIRST_S)
