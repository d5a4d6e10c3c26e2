"""Both sides of handoffs in a world whose writes land late (see `tests.handoff_world`).

Once driven by hypothesis, which finds and shrinks, and once by seeded dice, which go further.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.handoff_world import HandoffWorld

LENGTHS = (12, 9, 5, 4, 1)
SECONDS = (0.01, 0.03, 1.0, 6.0, 11.0)
FAULTS = tuple(HandoffWorld().faults())


class HandoffPair(RuleBasedStateMachine):
    """Hypothesis picks what happens next."""

    def __init__(self) -> None:
        super().__init__()
        self.world = HandoffWorld()

    @rule(
        num_tokens=st.sampled_from(LENGTHS),
        ends=st.lists(st.booleans(), min_size=1, max_size=2),
        allow_local=st.booleans(),
        first=st.integers(0, 1),
        num_cached=st.integers(0, 2),
    )
    def start(
        self, num_tokens: int, ends: list[bool], allow_local: bool, first: int, num_cached: int
    ) -> None:
        self.world.start(num_tokens, ends, allow_local, first, num_cached)

    @rule(data=st.data(), times=st.integers(3, 16))
    def work(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            actions = self.world.actions()
            if actions:
                data.draw(st.sampled_from(actions))()
                self.world.check()

    @rule(seconds=st.sampled_from(SECONDS), starving=st.booleans())
    def time_passes(self, seconds: float, starving: bool) -> None:
        self.world.has_faults |= seconds > 1.0
        self.world.time_passes(seconds, starving=starving)
        self.world.check()

    @rule(data=st.data(), kind=st.sampled_from(FAULTS))
    def fault(self, data: st.DataObject, kind: str) -> None:
        self.world.has_faults = True
        possible = self.world.faults()[kind]
        if possible:
            data.draw(st.sampled_from(possible))()
            self.world.check()

    def teardown(self) -> None:
        self.world.settle_down()


TestHandoffPair = HandoffPair.TestCase
TestHandoffPair.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@pytest.mark.parametrize("seed", range(8))
def test_seeded_walks(seed: int) -> None:
    """Few requests, few faults, many orders: most steps are work, so that attempts go far."""
    dice = random.Random(seed)
    for _ in range(120):
        world = HandoffWorld()
        world.has_faults = True
        for _ in range(dice.randrange(20, 120)):
            walk(world, dice)
            world.check()
        world.settle_down()


def walk(world: HandoffWorld, dice: random.Random) -> None:
    """Let one thing happen."""
    what = dice.random()
    if what < 0.06:
        ends = [dice.random() < 0.2 for _ in range(dice.choice([1, 1, 2]))]
        world.start(
            dice.choice(LENGTHS), ends, dice.random() < 0.5, dice.randrange(2), dice.randrange(3)
        )
    elif what < 0.12:
        world.time_passes(dice.choice(SECONDS), starving=dice.random() < 0.3)
    elif what < 0.2:
        possible = world.faults()[dice.choice(FAULTS)]
        if possible:
            dice.choice(possible)()
    elif actions := world.actions():
        dice.choice(actions)()
