"""core.clock: a manual clock moves only when told, and never back."""

from __future__ import annotations

import pytest

from core.clock import ManualClock, SystemClock


def test_manual_clock_stands_until_advanced() -> None:
    clock = ManualClock(5.0)
    assert (clock.now(), clock.wall()) == (5.0, 5.0)
    clock.advance(0.5)
    assert (clock.now(), clock.wall()) == (5.5, 5.5)


def test_manual_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        ManualClock().advance(-1.0)


def test_system_clock_is_monotonic_and_has_an_epoch() -> None:
    clock = SystemClock()
    first = clock.now()
    assert clock.now() >= first
    assert clock.wall() > 1_700_000_000
