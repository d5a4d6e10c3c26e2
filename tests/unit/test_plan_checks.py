"""What every executor refuses of a plan."""

from __future__ import annotations

import pytest

from core.ids import SlotId
from core.sampling_params import SamplingParams
from engine.executor.interface import SlotAdded
from engine.executor.plan_checks import check_added, check_group


def added(slot: int = 0, num_tokens: int = 4, num_computed: int = 0) -> SlotAdded:
    return SlotAdded(
        slot=SlotId(slot),
        token_ids=tuple(range(num_tokens)),
        num_prompt=num_tokens,
        num_computed=num_computed,
        block_tables=((),),
        sampling=SamplingParams(),
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (added(slot=2), "slot 2: must be free and below 2"),
        (added(slot=-1), "slot -1: must be free and below 2"),
        (added(slot=1), "slot 1: must be free and below 2"),
        (added(num_tokens=9), "slot 0: 9 tokens, 0 computed; at most 8 tokens"),
        (added(num_computed=4), "slot 0: 4 tokens, 4 computed; .* at least one to compute"),
    ],
)
def test_a_sequence_without_a_place_is_refused(wrong: SlotAdded, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_added(wrong, {SlotId(1)}, num_slots=2, max_tokens=8)


def test_a_sequence_that_has_one_is_not() -> None:
    check_added(added(num_tokens=8, num_computed=7), {SlotId(1)}, num_slots=2, max_tokens=8)


def test_there_is_one_kv_group() -> None:
    check_group(0)
    with pytest.raises(ValueError, match="KV group 1: this model has one group, 0"):
        check_group(1)
