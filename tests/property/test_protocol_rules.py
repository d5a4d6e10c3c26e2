"""Each rule of handoff.md, broken once in the real code: the simulation finds a violation, and
without the break it finds none in the same runs."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Iterator

import pytest

from core.clock import SystemClock
from planner.protocol.__main__ import main
from planner.protocol.scenario import Scenario, scenario_of
from planner.protocol.shrink import run, shrink
from planner.protocol.simulation import Outcome
from tests.broken_rules import BROKEN_RULES, BrokenRule

NUM_SEEDS = 300


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What the cluster says of its faults is not news here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _scenario(rule: BrokenRule, seed: int) -> Scenario:
    dice = random.Random(seed)
    return rule.focus(scenario_of(seed, dice), dice)


def _find(rule: BrokenRule) -> Outcome | None:
    """Return the first run that shows a violation: of the rule's own seed, then of any."""
    for seed in (rule.seed, *range(NUM_SEEDS)):
        outcome = run(_scenario(rule, seed), random.Random)
        if outcome.violation is not None:
            return outcome
    return None


@pytest.mark.parametrize("rule", BROKEN_RULES, ids=lambda rule: rule.breaks.__name__)
def test_a_broken_rule_is_found(rule: BrokenRule, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        rule.breaks(patch)
        found = _find(rule)
    assert found is not None, f"{NUM_SEEDS} seeds do not see that it does not hold: {rule.rule}"
    assert found.violation is not None
    assert found.violation.invariant in rule.violated, found.violation
    assert run(found.scenario, random.Random).violation is None, "kept, it is no violation"


def test_shrinking_drops_all_that_the_violation_does_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = next(rule for rule in BROKEN_RULES if "heartbeats" in rule.rule)
    rule.breaks(monkeypatch)
    found = _find(rule)
    assert found is not None
    least = shrink(found, random.Random)
    assert found.violation is not None
    assert least.violation is not None
    assert least.violation.invariant == found.violation.invariant
    assert 1 <= len(least.scenario.faults) < len(found.scenario.faults)
    assert 1 <= len(least.scenario.requests) < len(found.scenario.requests)
    again = run(least.scenario, random.Random)
    assert again == least, "a shrunk scenario is one run, too"


def test_the_command_tells_the_seed_the_invariant_the_faults_and_the_last_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = next(rule for rule in BROKEN_RULES if "abandoned" in rule.rule)
    rule.breaks(monkeypatch)
    for seed in range(NUM_SEEDS):
        out = io.StringIO()
        code = main(["--first", str(seed), "--seeds", "1"], out, SystemClock())
        if code and "Fault(kind=" in out.getvalue():
            break
    else:
        pytest.fail(f"{NUM_SEEDS} seeds do not find it where a fault is needed")
    told = out.getvalue()
    assert f"seed {seed}: writable: " in told
    assert "RequestPlan(at=" in told
    assert "VIOLATION writable" in told
