"""core.ids: attempts are ordered, and handoffs say which one they are."""

from __future__ import annotations

from core.ids import Attempt, HandoffId, RequestId, new_boot


def test_boots_are_fresh_and_128_bits() -> None:
    boots = {new_boot() for _ in range(100)}
    assert len(boots) == 100
    assert all(len(bytes.fromhex(boot)) == 16 for boot in boots)


def test_a_later_dispatch_is_later_than_any_trial_of_an_earlier_one() -> None:
    first = Attempt(1, 9)
    assert first < first.next_trial() < Attempt(2, 1)
    assert first.next_trial() == Attempt(1, 10)


def test_handoff_names_request_dispatch_and_trial() -> None:
    assert str(HandoffId(RequestId("req-1"), Attempt(2, 3))) == "req-1/2.3"
