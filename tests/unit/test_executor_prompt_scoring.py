"""Prompt tokens' scores out of the executors: whole, chunked, beside others, in slices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.request import PromptLogprobs
from core.sampling_params import SamplingParams
from engine.executor import prompt_scoring
from engine.executor.prompt_scoring import SLICE_ROWS
from engine.sampling.prompt_logprobs import PromptScores, score
from tests.prompt_scores import joined
from tests.step_driver import EXACT, NATIVE, StepDriver, work
from tests.tiny_models import save_tiny

PROMPT = [(7 * index * index + 3) % 97 for index in range(2 * SLICE_ROWS + 22)]
SAMPLED = SamplingParams(temperature=0.0, logprobs=1)


@pytest.fixture(scope="module", params=[EXACT, NATIVE], ids=lambda config: config.executor)
def driver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StepDriver]:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny(directory)
    driver = StepDriver(directory, num_blocks=128, config=request.param)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def reference(driver: StepDriver) -> Tensor:
    logits = driver.logits(work(0, len(PROMPT)), added=(driver.added(0, PROMPT),))
    driver.remove(0)
    return logits.log_softmax(dim=-1)


def check(scored: PromptLogprobs, reference: Tensor, num_top: int) -> None:
    assert (scored.start, scored.end, scored.num_top) == (1, len(PROMPT), num_top)
    rows, tokens = reference[: len(PROMPT) - 1], torch.tensor(PROMPT[1:])[:, None]
    chosen = rows.gather(1, tokens)
    torch.testing.assert_close(torch.tensor(scored.chosen), chosen[:, 0], atol=1e-4, rtol=0.0)
    top, top_ids = rows.topk(num_top, dim=1)
    shape = (len(PROMPT) - 1, num_top)
    torch.testing.assert_close(torch.tensor(scored.top).reshape(shape), top, atol=1e-4, rtol=0.0)
    is_same = torch.tensor(scored.top_ids, dtype=torch.int64).reshape(shape) == top_ids
    assert int((~is_same).sum()) <= 4, "but for ties"
    ranks = (rows >= chosen).sum(dim=1)
    assert (torch.tensor(scored.ranks) == ranks).float().mean() > 0.98


def parts_of(driver: StepDriver, sizes: list[int], num_top: int) -> list[PromptLogprobs]:
    added = driver.added(0, PROMPT, SAMPLED, prompt_logprobs=num_top)
    parts: list[PromptLogprobs] = []
    for size in sizes:
        is_last = sum(sizes) == len(PROMPT) and size == sizes[-1]
        result = driver.step(work(0, size, int(is_last)), added=(added,) if not parts else ())[0]
        assert result.prompt_logprobs is not None
        assert len(result.token_ids) == len(result.logprobs) == int(is_last)
        parts.append(result.prompt_logprobs)
    decoded = driver.step(work(0, 1, 1))[0]
    assert (len(decoded.token_ids), decoded.prompt_logprobs) == (1, None)
    driver.remove(0)
    return parts


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_whole_prompt(driver: StepDriver, reference: Tensor, num_top: int) -> None:
    (scored,) = parts_of(driver, [len(PROMPT)], num_top)
    check(scored, reference, num_top)


def test_chunks_say_the_same(driver: StepDriver, reference: Tensor) -> None:
    parts = parts_of(driver, [1, 15, 48, 64, len(PROMPT) - 128], 2)
    assert [part.start for part in parts] == [1, 2, 17, 65, 129]
    check(joined(parts), reference, 2)


def test_beside_slots_that_do_not_ask(driver: StepDriver, reference: Tensor) -> None:
    driver.step(work(1, 30, 1), added=(driver.added(1, PROMPT[:30]),))
    added = (driver.added(0, PROMPT, prompt_logprobs=1), driver.added(2, PROMPT[:20]))
    results = driver.step(work(2, 20), work(0, len(PROMPT)), work(1, 1, 1), added=added)
    assert [one.prompt_logprobs is None for one in results] == [True, False, True]
    assert [len(one.token_ids) for one in results] == [0, 0, 1]
    scored = results[1].prompt_logprobs
    assert scored is not None
    check(scored, reference, 1)
    driver.remove(0, 1, 2)


def test_a_prompt_s_last_token_alone_scores_nothing(driver: StepDriver) -> None:
    added = driver.added(0, PROMPT[:17], prompt_logprobs=1)
    driver.step(work(0, 16), added=(added,))
    (result,) = driver.step(work(0, 1, 1))
    assert (result.prompt_logprobs, len(result.token_ids)) == (None, 1)
    driver.remove(0)


def test_outputs_that_are_known_are_not_scored(driver: StepDriver) -> None:
    added = driver.added(0, PROMPT[:40], num_prompt=30, prompt_logprobs=0)
    (result,) = driver.step(work(0, 40, 1), added=(added,))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.end == 30
    driver.remove(0)


def test_logits_exist_a_slice_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch; the native library has room for so many rows."""
    save_tiny(tmp_path)
    driver = StepDriver(tmp_path, num_blocks=128)
    seen: list[int] = []

    def recorded(logits: Tensor, token_ids: Tensor, num_top: int) -> PromptScores:
        seen.append(len(logits))
        return score(logits, token_ids, num_top)

    monkeypatch.setattr(prompt_scoring, "score", recorded)
    parts_of(driver, [len(PROMPT)], 1)
    driver.close()
    assert seen == [SLICE_ROWS, SLICE_ROWS, len(PROMPT) - 1 - 2 * SLICE_ROWS]


def test_more_alternatives_than_the_vocabulary_are_all() -> None:
    scores = score(torch.tensor([[0.0, 1.0, -torch.inf]]), torch.tensor([2]), 20)
    assert scores.top_ids.tolist() == [[1, 0, 2]]
    assert scores.ranks.tolist() == [3]
    assert scores.chosen.tolist() == [-torch.inf]
