"""Each rule of the handoff protocol, broken once: a violation is found, and none without the break.

The table is `tests.handoff_rules`.
"""

from __future__ import annotations

import re

import pytest

from engine.memory.block_pool import BlockStateError
from tests.handoff_checker import Bounds, HandoffChecker, ViolationError
from tests.handoff_rules import RULES, Rule

# What a part says when its own invariants notice first.
NOTICED = (AssertionError, BlockStateError, KeyError, ValueError, pytest.fail.Exception)


def find(rule: Rule, max_depth: int | None = None) -> None:
    """Look for a violation."""
    if isinstance(rule.where, Bounds):
        HandoffChecker(rule.where).run(max_depth)
    else:
        rule.where()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_broken_rule_is_found(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        rule.breaks(patch)
        with pytest.raises(NOTICED) as found:
            find(rule)
    violation = found.value
    said = violation.what if isinstance(violation, ViolationError) else str(violation)
    assert re.search(rule.violated, said), f"{rule.text}: {violation}"
    # As far as the violation was: the whole of these bounds may be large.
    find(rule, len(violation.path) if isinstance(violation, ViolationError) else None)


def test_a_violation_is_told_with_a_shortest_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = next(rule for rule in RULES if rule.name == "aborted_blocks_are_free_at_once")
    rule.breaks(monkeypatch)
    with pytest.raises(ViolationError) as found:
        find(rule)
    assert str(found.value).splitlines() == [
        "a write may land in a free block, after",
        "  1. decode.reserve()",
        "  2. decode.tell_reserved()",
        "  3. decode.open(1)",
        "  4. prefill.receive(1)",
        "  5. prefill.compute(p0.0, 1/1.1)",
        "  6. prefill.compute(p0.0, 1/1.1)",
        "  7. abort(faults.abort(1))",
    ]
