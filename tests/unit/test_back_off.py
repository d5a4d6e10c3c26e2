"""core.back_off, and deploy.launcher.restart_delay on top of it."""

from __future__ import annotations

from random import Random

import pytest

from core.back_off import BackOff
from deploy.launcher.restart_delay import FORGIVEN_AFTER_S, LONGEST_DELAY_S, RestartDelay


class Largest:
    """Draws no jitter."""

    def random(self) -> float:
        return 0.0


def test_waits_double_to_their_limit_with_jitter() -> None:
    rng, back_off = Random(1), BackOff(first_s=0.1, limit_s=0.5)
    waits = [back_off.next_s(rng) for _ in range(6)]
    for wait, full in zip(waits, [0.1, 0.2, 0.4, 0.5, 0.5, 0.5], strict=True):
        assert full / 2 <= wait <= full
    assert len(set(waits)) == 6
    back_off.reset()
    assert back_off.next_s(rng) <= 0.1


def test_no_wait_exceeds_the_limit_even_the_first() -> None:
    back_off = BackOff(first_s=0.1, limit_s=0.05)
    assert [back_off.next_s(Largest()), back_off.next_s(Largest())] == [0.05, 0.05]


def test_deaths_in_a_row_wait_longer_and_a_long_life_is_forgiven() -> None:
    delay = RestartDelay(Largest())
    waits = [delay.after(1.0) for _ in range(9)]
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert waits[-1] == LONGEST_DELAY_S
    assert delay.after(FORGIVEN_AFTER_S) == pytest.approx(0.5)
    assert delay.after(0.0) == pytest.approx(1.0)
