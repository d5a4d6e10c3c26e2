"""deploy.back_off: delays double up to a bound, and a long life is forgiven."""

from __future__ import annotations

from deploy.back_off import FORGIVEN_AFTER_S, LONGEST_DELAY_S, BackOff


def test_delays_double_up_to_the_longest() -> None:
    back_off = BackOff()
    delays = [back_off.delay(1.0) for _ in range(9)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == LONGEST_DELAY_S
    assert delays == sorted(delays)


def test_a_long_life_starts_over() -> None:
    back_off = BackOff()
    for _ in range(5):
        back_off.delay(0.0)
    assert back_off.delay(FORGIVEN_AFTER_S) == 0.5
    assert back_off.delay(0.0) == 1.0
