"""The executors against transformers, float32 weights and cache, on the real model.

Every free block and every unwritten position holds NaN, so a read beyond a sequence shows.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from core.config import EngineConfig
from core.sampling_params import SamplingParams
from tests.figures import Figures
from tests.oracle import REFERENCE_MARGIN, Oracle, disagreements, smollm2
from tests.prompt_scores import joined
from tests.step_driver import EXACT, NATIVE, StepDriver, work

TOLERANCE = 5e-4
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411]
LONG = [(7919 * index * index + 31 * index) % 49_000 + 20 for index in range(200)]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return smollm2()


@pytest.fixture(scope="module", params=[EXACT, NATIVE], ids=lambda config: config.executor)
def driver(request: pytest.FixtureRequest, oracle: Oracle) -> Iterator[StepDriver]:
    driver = StepDriver(oracle.path, num_blocks=200, config=request.param)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def native_driver(oracle: Oracle) -> Iterator[StepDriver]:
    driver = StepDriver(oracle.path, num_blocks=200, config=NATIVE)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def long_reference(oracle: Oracle) -> Tensor:
    return oracle.reference_logits(LONG)


def check(ours: Tensor, reference: Tensor) -> None:
    difference = float((ours - reference).abs().max())
    assert difference <= TOLERANCE
    assert disagreements(ours, reference) == []


def test_one_chunk(driver: StepDriver, long_reference: Tensor, figures: Figures) -> None:
    logits = driver.logits(work(0, len(LONG)), added=(driver.added(0, LONG),))
    driver.remove(0)
    difference = float((logits - long_reference).abs().max())
    figures(f"executor against transformers, f32: largest logit difference {difference:.1e}")
    check(logits, long_reference)


def test_chunks_of_64(driver: StepDriver, long_reference: Tensor) -> None:
    sizes = [64, 64, 64, len(LONG) - 192]
    parts = [driver.logits(work(0, sizes[0]), added=(driver.added(0, LONG),))]
    parts += [driver.logits(work(0, size)) for size in sizes[1:]]
    driver.remove(0)
    check(torch.cat(parts), long_reference)


def test_decodes_after_a_chunk(driver: StepDriver, long_reference: Tensor) -> None:
    parts = [driver.logits(work(0, 170), added=(driver.added(0, LONG),))]
    parts += [driver.logits(work(0, 1)) for _ in range(170, len(LONG))]
    driver.remove(0)
    check(torch.cat(parts), long_reference)


def test_sixteen_sequences_of_mixed_lengths(native_driver: StepDriver, oracle: Oracle) -> None:
    """Chunks and decodes share steps; short contexts decode beside long ones."""
    driver = native_driver
    sequences = [LONG[slot : slot + 4 + 5 * slot] for slot in range(15)] + [LONG]
    chunks = [work(slot, len(tokens) - 3) for slot, tokens in enumerate(sequences)]
    added = tuple(driver.added(slot, tokens) for slot, tokens in enumerate(sequences))
    # The odd slots decode their first token while the even ones compute their chunks.
    odd = driver.logits(*chunks[1::2], added=added[1::2])
    mixed = driver.logits(
        *chunks[0::2], *[work(slot, 1) for slot in range(1, 16, 2)], added=added[0::2]
    )
    rest_odd = [driver.logits(*[work(slot, 1) for slot in range(1, 16, 2)]) for _ in range(2)]
    rest_even = [driver.logits(*[work(slot, 1) for slot in range(0, 16, 2)]) for _ in range(3)]
    driver.remove(*range(16))
    even_rows = sum(chunk.num_query for chunk in chunks[0::2])
    decodes = {1: [mixed[even_rows:], *rest_odd], 0: rest_even}
    chunk_rows = {1: odd, 0: mixed[:even_rows]}
    for slot, tokens in enumerate(sequences):
        kind, index = slot % 2, slot // 2
        first = sum(chunk.num_query for chunk in chunks[kind:slot:2])
        chunk = chunk_rows[kind][first : first + len(tokens) - 3]
        ours = torch.cat([chunk, *[step[index : index + 1] for step in decodes[kind]]])
        check(ours, oracle.reference_logits(tokens))


def test_greedy_tokens_and_their_logprobs(driver: StepDriver, oracle: Oracle) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=3)
    added = driver.added(0, PROMPT, sampling)
    results = [driver.step(work(0, len(PROMPT), 1), added=(added,))[0]]
    results += [driver.step(work(0, 1, 1))[0] for _ in range(11)]
    driver.remove(0)
    tokens = [token for result in results for token in result.token_ids]
    assert tokens == oracle.greedy(PROMPT, 12)
    reference = oracle.reference_logits(PROMPT + tokens).log_softmax(dim=-1)
    for index, result in enumerate(results):
        row = reference[len(PROMPT) + index - 1]
        (logprobs,) = result.logprobs
        top = row.topk(3)
        assert logprobs.chosen == pytest.approx(float(row[tokens[index]]), abs=1e-3)
        assert logprobs.top == pytest.approx(top.values.tolist(), abs=1e-3)
        assert logprobs.top_ids == tuple(top.indices.tolist())


def test_the_prompt_s_own_logprobs(
    driver: StepDriver, long_reference: Tensor, figures: Figures
) -> None:
    first, rest = 64, len(LONG) - 64
    added = driver.added(0, LONG, prompt_logprobs=3)
    results = [driver.step(work(0, first), added=(added,))[0], driver.step(work(0, rest))[0]]
    driver.remove(0)
    scored = joined([one.prompt_logprobs for one in results if one.prompt_logprobs])
    rows = long_reference.log_softmax(dim=-1)[:-1]
    reference = rows.gather(1, torch.tensor(LONG[1:])[:, None])[:, 0]
    difference = float((torch.tensor(scored.chosen) - reference).abs().max())
    figures(f"prompt logprobs against transformers, f32: largest difference {difference:.1e}")
    assert difference <= 1e-3
    top = rows.topk(3, dim=1)
    assert torch.tensor(scored.top).reshape(-1, 3) == pytest.approx(top.values, abs=1e-3)
    clear = (top.values[:, :-1] - top.values[:, 1:]).min(dim=1).values > REFERENCE_MARGIN
    assert (torch.tensor(scored.top_ids).reshape(-1, 3) == top.indices)[clear][:, :2].all()


def test_a_fence_between_steps_moves_the_pool_under_the_executor(
    driver: StepDriver, oracle: Oracle
) -> None:
    added = driver.added(0, PROMPT)
    tokens = list(driver.step(work(0, len(PROMPT), 1), added=(added,))[0].token_ids)
    driver.region.fence()
    tokens += [driver.step(work(0, 1, 1))[0].token_ids[0] for _ in range(5)]
    driver.remove(0)
    assert tokens == oracle.greedy(PROMPT, 6)


def test_bf16_stays_near_the_reference(oracle: Oracle, long_reference: Tensor) -> None:
    """The default arithmetic: rounding moves logits (0.4 was measured), and seldom a token."""
    driver = StepDriver(oracle.path, num_blocks=40, config=EngineConfig(weights="bf16"))
    logits = driver.logits(work(0, 150), added=(driver.added(0, LONG),))
    logits = torch.cat([logits, *[driver.logits(work(0, 1)) for _ in range(50)]])
    driver.close()
    difference = (logits - long_reference).abs()
    assert float(difference.max()) < 2.0
    assert float(difference.mean()) < 0.1
    agree = (logits.argmax(dim=-1) == long_reference.argmax(dim=-1)).float().mean()
    assert float(agree) > 0.93
