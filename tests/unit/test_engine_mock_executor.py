"""The mock executor: its tokens come from the bytes, its time from the model."""

from __future__ import annotations

import numpy as np
import pytest

from core.clock import ManualClock
from core.config import EngineConfig
from core.ids import BlockId, SlotId
from core.kv_layout import KvDtype, block_major
from core.sampling_params import SamplingParams
from engine.executor.interface import Handle, SlotAdded, SlotWork, StepPlan, TableEdit
from engine.executor.mock_executor import MockDevice, MockExecutor
from engine.executor.mock_pool import MockPool, mock_layout
from engine.executor.mock_tokens import expected_tokens, logprobs_of
from kv_transfer.bytes_region import BytesRegion
from tests.replica import EOS, VOCAB, poisoned_region

PROMPT = tuple(range(50, 70))
SAMPLING = SamplingParams(max_tokens=3, seed=9, eos_token_ids=(EOS,))


def executor_of(region: BytesRegion, device: MockDevice | None = None) -> MockExecutor:
    config = EngineConfig(mock_step_s=0.01, mock_prompt_token_s=0.001)
    clock = ManualClock()
    device = device or MockDevice(clock=clock, sleep=clock.advance)
    return MockExecutor(
        mock_layout(), region, num_blocks=4, vocab_size=VOCAB, config=config, device=device
    )


def region_of() -> BytesRegion:
    return poisoned_region(4 * mock_layout().block_bytes)


def prompt_plan(sampling: SamplingParams = SAMPLING, num_samples: int = 1) -> StepPlan:
    table = (BlockId(2), BlockId(0))
    added = SlotAdded(SlotId(0), PROMPT, 20, 0, (table,), sampling)
    return StepPlan(0, added=(added,), work=(SlotWork(SlotId(0), 20, num_samples),))


def decode_plan(table_edits: tuple[TableEdit, ...] = ()) -> StepPlan:
    return StepPlan(1, table_edits=table_edits, work=(SlotWork(SlotId(0), 1, 1),))


def run(executor: MockExecutor, plan: StepPlan, mask: object = None) -> tuple[int, ...]:
    handle = executor.submit(plan)
    executor.sample(handle, None if mask is None else {SlotId(0): mask})
    (result,) = executor.collect(handle).results
    return result.token_ids


def test_tokens_follow_the_oracle_through_scattered_blocks() -> None:
    executor = executor_of(region_of())
    tokens = run(executor, prompt_plan()) + run(executor, decode_plan())
    assert tokens == expected_tokens(PROMPT, SAMPLING, vocab_size=VOCAB)[:2]
    assert executor.numerics == "mock"
    executor.close()


def test_an_adapter_is_refused_rather_than_left_out() -> None:
    executor = executor_of(region_of())
    added = SlotAdded(SlotId(0), PROMPT, 20, 0, ((BlockId(2), BlockId(0)),), SAMPLING, adapter_id=3)
    with pytest.raises(ValueError, match="slot 0: adapter 3: this executor has adapter 0 only"):
        run(executor, StepPlan(0, added=(added,), work=(SlotWork(SlotId(0), 20, 1),)))


@pytest.mark.parametrize("offset", [0, 64 * 16 * 2 + 32 * 16])  # a key of block 0, a value of 2
def test_one_overwritten_byte_changes_the_token(offset: int) -> None:
    region = region_of()
    executor = executor_of(region)
    run(executor, prompt_plan())
    region.view()[offset] ^= 1
    second = run(executor, decode_plan())
    assert second != expected_tokens(PROMPT, SAMPLING, vocab_size=VOCAB)[1:2]


def test_a_wrong_table_changes_the_token() -> None:
    executor = executor_of(region_of())
    run(executor, prompt_plan())
    edit = TableEdit(SlotId(0), 0, 0, BlockId(3))
    second = run(executor, decode_plan(table_edits=(edit,)))
    assert second != expected_tokens(PROMPT, SAMPLING, vocab_size=VOCAB)[1:2]


def test_it_follows_a_region_that_moved() -> None:
    region = region_of()
    executor = executor_of(region)
    run(executor, prompt_plan())
    sink = region.view()
    region.fence()
    sink[:] = bytes(len(sink))
    assert (
        run(executor, decode_plan()) == (expected_tokens(PROMPT, SAMPLING, vocab_size=VOCAB)[1:2])
    )


def test_time_passes_on_the_device_and_collecting_waits_for_it() -> None:
    clock = ManualClock()
    executor = executor_of(region_of(), MockDevice(clock=clock, sleep=clock.advance))
    first, second = executor.submit(prompt_plan()), executor.submit(decode_plan())
    assert clock.now() == 0.0
    executor.sample(first)
    executor.sample(second)
    assert executor.collect(first).seconds == pytest.approx(0.03)
    assert clock.now() == pytest.approx(0.03)
    executor.collect(second)
    assert clock.now() == pytest.approx(0.04)


def test_samples_differ_with_temperature_and_not_without() -> None:
    for temperature, num_different in ((1.0, 3), (0.0, 1)):
        sampling = SamplingParams(n=3, temperature=temperature, max_tokens=1)
        tokens = run(executor_of(region_of()), prompt_plan(sampling, 3))
        assert len(set(tokens)) == num_different
        for index, token in enumerate(tokens):
            assert (token,) == expected_tokens(
                PROMPT, sampling, vocab_size=VOCAB, sample_index=index
            )


def test_bias_forces_and_bans_and_masks_allow() -> None:
    (drawn,) = expected_tokens(PROMPT, SamplingParams(max_tokens=1), vocab_size=VOCAB)
    forced = SamplingParams(max_tokens=1, logit_bias=((5, 1.0), (6, 100.0)))
    assert run(executor_of(region_of()), prompt_plan(forced)) == (6,)
    banned = SamplingParams(max_tokens=1, logit_bias=((drawn, -100.0),))
    assert run(executor_of(region_of()), prompt_plan(banned)) != (drawn,)
    mask = np.zeros(VOCAB, dtype=bool)
    mask[3] = True
    assert run(executor_of(region_of()), prompt_plan(), mask) == (3,)
    # A client can ban all: a token comes all the same, as from a real sampler.
    (token,) = run(executor_of(region_of()), prompt_plan(), np.zeros(VOCAB, dtype=bool))
    assert 0 <= token < VOCAB


def test_a_bad_words_last_token_is_not_drawn_after_the_others() -> None:
    free = expected_tokens(PROMPT, SamplingParams(max_tokens=6), vocab_size=VOCAB)
    word, unlike = free[2:5], (free[3], free[3], free[4])
    params = SamplingParams(max_tokens=6, bad_words=(unlike, word))
    tokens = expected_tokens(PROMPT, params, vocab_size=VOCAB)
    assert tokens[:4] == free[:4]
    assert tokens[4] != free[4]
    region = region_of()
    executor = executor_of(region)
    assert run(executor, prompt_plan(SamplingParams(bad_words=((free[0],),)))) != free[:1]
    # What the prompt ends with begins no word.
    begun = SamplingParams(max_tokens=1, bad_words=((PROMPT[-1], free[0]),))
    assert expected_tokens(PROMPT, begun, vocab_size=VOCAB) == free[:1]


def test_eos_comes_by_chance_only_where_that_is_wanted() -> None:
    sampling = SamplingParams(max_tokens=60, eos_token_ids=tuple(range(0, VOCAB, 4)))
    tokens = expected_tokens(PROMPT, sampling, vocab_size=VOCAB)
    assert len(tokens) == 60
    natural = expected_tokens(PROMPT, sampling, vocab_size=VOCAB, natural_stops=True)
    assert len(natural) < 60
    assert natural[-1] % 4 == 0


def test_logprobs_come_where_asked_for() -> None:
    assert logprobs_of(5, SamplingParams(), VOCAB) is None
    entry = logprobs_of(5, SamplingParams(logprobs=2), VOCAB)
    assert entry is not None
    assert (entry.chosen, entry.top_ids) == (-0.5, (5, 6))
    handle = (executor := executor_of(region_of())).submit(prompt_plan(SamplingParams(logprobs=1)))
    executor.sample(handle)
    assert len(executor.collect(Handle(0)).results[0].logprobs) == 1


def test_layouts_and_regions_that_are_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="exceed"):
        MockPool(mock_layout(), BytesRegion(100), 4)
    tiny = block_major(
        model="x", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype=KvDtype.BF16
    )
    with pytest.raises(ValueError, match="a mark needs 8 bytes"):
        MockPool(tiny, BytesRegion(1 << 16), 4)
