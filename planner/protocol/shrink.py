"""The fewest faults and requests that still show a violation."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from kv_transfer.inprocess.model import Dice
from planner.protocol.scenario import Scenario
from planner.protocol.simulation import Outcome, simulate

MakeDice = Callable[[str], Dice]
"""Returns dice seeded with a text; `random.Random`."""


def run_dice_seed(scenario: Scenario) -> str:
    """Return the seed of a run's dice; the scenario itself was drawn with others."""
    return f"run {scenario.seed}"


def run(scenario: Scenario, make_dice: MakeDice) -> Outcome:
    """Run a scenario with the dice of its seed."""
    return simulate(scenario, make_dice(run_dice_seed(scenario)))


def shrink(found: Outcome, make_dice: MakeDice) -> Outcome:
    """Drop faults, then requests, one by one, while the same invariant is violated.

    Args:
        found: a run with a violation.
        make_dice: the same for every run.

    Returns:
        the run with the fewest of both that was found.
    """
    assert found.violation is not None, "there is nothing to shrink"
    invariant = found.violation.invariant
    best = found
    while True:
        for smaller in _smaller(best.scenario):
            outcome = run(smaller, make_dice)
            if outcome.violation is not None and outcome.violation.invariant == invariant:
                best = outcome
                break
        else:
            return best


def _smaller(scenario: Scenario) -> list[Scenario]:
    """Return the scenarios with one fault less, then those with one request less."""
    faults, requests = scenario.faults, scenario.requests
    fewer_faults = [
        replace(scenario, faults=faults[:index] + faults[index + 1 :])
        for index in range(len(faults))
    ]
    fewer_requests = [
        replace(scenario, requests=requests[:index] + requests[index + 1 :])
        for index in range(len(requests))
    ]
    return fewer_faults + fewer_requests
