"""The program on tiny models: shapes that SmolLM2 does not have, and all a plan can ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from core.config import EngineConfig
from core.ids import BlockId, SlotId
from core.sampling_params import SamplingParams
from engine.executor.interface import BlockCopy, TableEdit
from tests.step_driver import EXACT, GREEDY, NATIVE, StepDriver, new_blocks, work
from tests.tiny_models import TOKENS, VOCAB_SIZE, reference, save_tiny

SHAPES: list[dict[str, Any]] = [
    {"num_attention_heads": 4, "num_key_value_heads": 4},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "head_dim": 12},
    {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 40},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("tiny")
    return directory, save_tiny(directory)


@pytest.fixture(params=[EXACT, NATIVE], ids=lambda config: config.executor)
def driver(request: pytest.FixtureRequest, tiny: tuple[Path, Any]) -> Any:
    driver = StepDriver(tiny[0], num_blocks=64, config=request.param)
    yield driver
    driver.close()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_logits_of_other_shapes(tmp_path: Path, shape: dict[str, Any]) -> None:
    model = save_tiny(tmp_path, **shape)
    driver = StepDriver(tmp_path, num_blocks=32)
    parts = [driver.logits(work(0, 140), added=(driver.added(0, TOKENS),))]
    parts += [driver.logits(work(0, 1)) for _ in range(10)]
    driver.close()
    torch.testing.assert_close(torch.cat(parts), reference(model, TOKENS), atol=5e-4, rtol=0.0)


def test_cached_values_are_rounded_before_attention_reads_them(tmp_path: Path) -> None:
    """A bf16 cache under f32 weights: a chunk and decodes must see the same rounded values."""
    model = save_tiny(tmp_path)
    driver = StepDriver(tmp_path, num_blocks=32, config=EngineConfig(weights="f32", threads=1))
    chunk = driver.logits(work(0, 40), added=(driver.added(0, TOKENS[:40]),))
    decodes = [driver.logits(work(1, 1), added=(driver.added(1, TOKENS[:40]),))]
    decodes += [driver.logits(work(1, 1)) for _ in range(39)]
    driver.close()
    torch.testing.assert_close(torch.cat(decodes), chunk, atol=5e-4, rtol=0.0)
    rounding = (chunk - reference(model, TOKENS[:40])).abs().max()
    assert rounding > 1e-3  # the cache did round


def test_greedy_decoding_across_new_blocks(driver: StepDriver, tiny: tuple[Path, Any]) -> None:
    prompt = TOKENS[:15]
    added = driver.added(0, prompt, room=0)
    tokens = list(driver.step(work(0, 15, 1), added=(added,))[0].token_ids)
    for position in range(15, 40):
        fresh = (new_blocks(0, *driver.take(1)),) if position % 16 == 0 else ()
        tokens += driver.step(work(0, 1, 1), new_blocks=fresh)[0].token_ids
    assert tokens == greedy(tiny[1], prompt, 26)


def test_a_prefix_computed_by_another_sequence(driver: StepDriver, tiny: tuple[Path, Any]) -> None:
    driver.step(work(0, 50), added=(driver.added(0, TOKENS[:50]),))
    added = driver.added(1, TOKENS[:60], num_computed=48)
    shared = (*driver.tables[0][:3], *added.block_tables[0][3:])
    added = replace(added, block_tables=(shared,))
    results = driver.step(work(1, 12, 1), added=(added,))
    assert list(results[0].token_ids) == greedy(tiny[1], TOKENS[:60], 1)


def test_copy_on_write_of_a_shared_tail(driver: StepDriver, tiny: tuple[Path, Any]) -> None:
    """Two samples of one prompt share its blocks; the first to write gets a clone of the tail."""
    prompt = TOKENS[:20]
    first = driver.added(0, prompt)
    sampling = SamplingParams(temperature=1.0, n=2, seed=7)
    tokens = driver.step(work(0, 20, 2), added=(first,))[0].token_ids
    assert len(tokens) == 2
    table = tuple(driver.tables[0])
    driver.step(removed=(SlotId(0),))
    clone, fork = driver.take(1)[0], []
    for index, token in enumerate((40, 41)):
        added = driver.added(index + 1, [*prompt, token], sampling, num_computed=20)
        fork.append(replace(added, block_tables=(table[:2],), sampling=GREEDY, num_prompt=20))
    results = driver.step(
        work(1, 1, 1),
        work(2, 1, 1),
        added=tuple(fork),
        table_edits=(TableEdit(SlotId(1), 0, 1, clone),),
        copies=(BlockCopy(table[1], clone),),
    )
    for index, token in enumerate((40, 41)):
        assert list(results[index].token_ids) == greedy(tiny[1], [*prompt, token], 1)
    copied, own = (driver.block(block).view(torch.int32) for block in (table[1], clone))
    assert int((copied != own).sum()) <= 2 * 2 * 2 * 8  # one position of layers, heads, k and v


def test_zeroes_fill_whole_blocks(driver: StepDriver) -> None:
    (block,) = driver.take(1)
    assert driver.block(block).isnan().all()
    driver.step(zeroes=(block,))
    assert not driver.block(block).any()


def test_the_tail_of_a_partial_block_is_zeroed(tiny: tuple[Path, Any]) -> None:
    """In torch, whose attention multiplies what it masks by zero; the native one skips it."""
    driver = StepDriver(tiny[0], num_blocks=64)
    driver.step(work(0, 21, 1), added=(driver.added(0, TOKENS[:21]),))
    tail = driver.block(driver.tables[0][1]).view(-1, 16, 8)
    assert tail[:, :5].any()
    assert not tail[:, 5:].any()
    assert driver.block(driver.tables[0][2]).isnan().all()  # not touched before its time
    driver.close()


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_drafts_are_accepted_while_they_equal_the_own_samples(
    driver: StepDriver, tiny: tuple[Path, Any], num_right: int
) -> None:
    prompt = TOKENS[:17]
    expected = greedy(tiny[1], prompt, 8)
    driver.step(work(0, 17, 1), added=(driver.added(0, prompt),))
    drafts = [
        *expected[1 : 1 + num_right],
        *[(t + 1) % VOCAB_SIZE for t in expected[1 + num_right : 4]],
    ]
    (result,) = driver.step(work(0, 4, 1, drafts))
    tokens = [expected[0], *result.token_ids]
    assert len(result.token_ids) == num_right + 1
    while len(tokens) < 8:
        tokens += driver.step(work(0, 1, 1))[0].token_ids
    assert tokens[:8] == expected


def test_rejected_drafts_take_no_room(driver: StepDriver, tiny: tuple[Path, Any]) -> None:
    """The host's bound of the length follows what was accepted, or it would leave the table."""
    prompt = TOKENS[:17]
    expected = greedy(tiny[1], prompt, 12)
    added = driver.added(0, prompt, room=15)  # two blocks
    tokens = list(driver.step(work(0, 17, 1), added=(added,))[0].token_ids)
    while len(tokens) < 12:
        wrong = (expected[len(tokens)] + 1) % VOCAB_SIZE
        tokens += driver.step(work(0, 3, 1, [wrong, wrong]))[0].token_ids
    assert tokens == expected


def test_steps_overlap_without_the_host_knowing_tokens(
    driver: StepDriver, tiny: tuple[Path, Any]
) -> None:
    """Two steps in flight, the first with drafts of unknown fate."""
    prompt = TOKENS[:17]
    expected = greedy(tiny[1], prompt, 4)
    driver.step(work(0, 17, 1), added=(driver.added(0, prompt),))
    executor = driver.executor
    one = executor.submit(driver.plan(work(0, 3, 1, [expected[1], 96])))
    executor.sample(one)
    two = executor.submit(driver.plan(work(0, 1, 1)))
    executor.sample(two)
    first, second = executor.collect(one), executor.collect(two)
    tokens = [*first.results[0].token_ids, *second.results[0].token_ids]
    assert tokens == expected[1:4]


def test_hidden_states_of_sampled_positions(driver: StepDriver, tiny: tuple[Path, Any]) -> None:
    added = driver.added(0, TOKENS[:9], return_hidden=True)
    (result,) = driver.step(work(0, 9, 1), added=(added,))
    with torch.inference_mode():
        hidden = tiny[1].model(torch.tensor([TOKENS[:9]])).last_hidden_state[0, -1]
    assert result.hidden == pytest.approx(hidden.tolist(), abs=1e-4)


def test_chunks_that_are_not_the_last_return_nothing(driver: StepDriver) -> None:
    (result,) = driver.step(work(0, 16), added=(driver.added(0, TOKENS[:20], return_hidden=True),))
    assert (result.token_ids, result.logprobs, result.hidden) == ((), (), None)


def test_a_mask_rules_what_may_be_drawn(driver: StepDriver) -> None:
    allowed = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    allowed[61] = True
    added = driver.added(0, TOKENS[:9]), driver.added(1, TOKENS[:9])
    results = driver.step(work(0, 9, 1), work(1, 9, 1), added=added, masks={SlotId(1): allowed})
    assert results[1].token_ids == (61,)
    assert results[0].token_ids != (61,)


def test_every_layer_signals_in_order(driver: StepDriver) -> None:
    layers: list[int] = []
    driver.executor.on_signal = layers.append
    driver.step(work(0, 9), added=(driver.added(0, TOKENS[:9]),))
    assert layers == [0, 1]


def test_tokens_do_not_depend_on_company(tiny: tuple[Path, Any]) -> None:
    """Sampled tokens, alone and in a batch whose other members come and go."""
    sampling = SamplingParams(temperature=1.0, seed=2**63 + 5, top_p=0.95)
    driver = StepDriver(tiny[0], num_blocks=64)
    alone = driver.generate(TOKENS[:20], 12, sampling)
    added = [driver.added(0, TOKENS[:20], sampling), driver.added(1, TOKENS[:70])]
    tokens = list(driver.step(work(0, 20, 1), work(1, 64), added=tuple(added))[0].token_ids)
    tokens += driver.step(work(1, 6, 1), work(0, 1, 1))[1].token_ids
    tokens += driver.step(work(1, 1, 1), work(0, 1, 1))[1].token_ids
    driver.remove(1)
    while len(tokens) < 12:
        tokens += driver.step(work(0, 1, 1))[0].token_ids
    driver.close()
    assert tokens == alone


def test_misuse_is_said(driver: StepDriver) -> None:
    plan = driver.plan(work(0, 9, 1), added=(driver.added(0, TOKENS[:9]),))
    handle = driver.executor.submit(plan)
    with pytest.raises(ValueError, match="not sampled yet"):
        driver.executor.submit(driver.plan())
    with pytest.raises(ValueError, match="must be sampled"):
        driver.executor.collect(handle)


def test_misuse_of_numbers_and_slots(driver: StepDriver) -> None:
    first = driver.plan()
    second = driver.plan()
    with pytest.raises(ValueError, match="plan 1: 0 is the next"):
        driver.executor.submit(second)
    for plan in (first, second):
        driver.executor.sample(driver.executor.submit(plan))
    with pytest.raises(ValueError, match="slot 64: must be free and below 64"):
        driver.step(added=(driver.added(64, TOKENS[:3]),))


def test_an_adapter_is_refused_rather_than_left_out(driver: StepDriver) -> None:
    with pytest.raises(ValueError, match="slot 0: adapter 3: this executor has adapter 0 only"):
        driver.step(added=(driver.added(0, TOKENS[:3], adapter_id=3),))


def test_numerics_name_what_can_change_a_token(driver: StepDriver) -> None:
    assert driver.executor.numerics.startswith(("torch-", "native-"))
    assert driver.executor.numerics.endswith("/weights-f32/kv-f32/tp-1")
    assert driver.executor.num_blocks == 64
    assert driver.executor.layout == driver.layout
    assert EXACT.threads == 1
    assert BlockId(0) in driver.take(64)
