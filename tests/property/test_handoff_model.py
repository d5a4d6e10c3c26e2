"""Every order in which one handoff, its faults and aborts can happen, within bounds."""

from __future__ import annotations

import pytest

from tests.figures import Figures
from tests.handoff_bounds import LARGE, SMALL, main
from tests.handoff_checker import Bounds, HandoffChecker


@pytest.mark.parametrize("bounds", SMALL, ids=lambda bounds: bounds.name)
def test_nothing_is_violated_and_all_comes_to_an_end(bounds: Bounds, figures: Figures) -> None:
    reach = HandoffChecker(bounds).run()
    assert reach.num_ends
    figures(f"handoff, {reach}")


def test_the_command_prints_its_reach(capsys: pytest.CaptureFixture[str]) -> None:
    assert LARGE[: len(SMALL)] == SMALL
    assert main(["are aborted"]) == 0
    assert "samples are aborted: " in capsys.readouterr().out
