"""Both sides of handoffs in a world whose writes land late (see `tests.handoff_world`).

Once driven by hypothesis, which finds and shrinks, and once by seeded dice, which go further.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.handoff_invariants import check
from tests.handoff_world import HandoffWorld

LENGTHS = (12, 9, 5, 4, 1)
SECONDS = (0.01, 0.03, 1.0, 6.0, 11.0)
FAULTS = tuple(HandoffWorld().faults.possible())


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
        self.world.start(
            num_tokens, ends, allow_local=allow_local, first=first, num_cached=num_cached
        )

    @rule(data=st.data(), times=st.integers(3, 16))
    def work(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            actions = [*self.world.actions(), *self.world.chances()]
            if actions:
                self.world.perform(data.draw(st.sampled_from(actions)))
                check(self.world.scene)

    @rule(seconds=st.sampled_from(SECONDS))
    def time_passes(self, seconds: float) -> None:
        self.world.scene.num_faults += seconds > 1.0
        self.world.pass_time(seconds)
        check(self.world.scene)

    @rule(data=st.data(), kind=st.sampled_from(FAULTS))
    def fault(self, data: st.DataObject, kind: str) -> None:
        self.world.scene.num_faults += 1
        possible = self.world.faults.possible()[kind]
        if possible:
            self.world.perform(data.draw(st.sampled_from(possible)))
            check(self.world.scene)

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
        world.scene.num_faults = 1
        for _ in range(dice.randrange(20, 120)):
            walk(world, dice)
            check(world.scene)
        world.settle_down()


def walk(world: HandoffWorld, dice: random.Random) -> None:
    """Let one thing happen."""
    what = dice.random()
    if what < 0.06:
        ends = [dice.random() < 0.2 for _ in range(dice.choice([1, 1, 2]))]
        world.start(
            dice.choice(LENGTHS),
            ends,
            allow_local=dice.random() < 0.5,
            first=dice.randrange(2),
            num_cached=dice.randrange(3),
        )
    elif what < 0.12:
        world.pass_time(dice.choice(SECONDS))
    elif what < 0.2:
        possible = world.faults.possible()[dice.choice(FAULTS)]
        if possible:
            world.perform(dice.choice(possible))
    elif actions := [*world.actions(), *world.chances()]:
        world.perform(dice.choice(actions))
