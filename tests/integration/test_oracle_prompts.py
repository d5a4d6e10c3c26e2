"""Twenty prompts teacher-forced: the executor's logits against transformers', both in float32.

The ids that both are fed are the executor's greedy ones. As each is the reference's arg-max too,
they are the reference's greedy ids, by induction.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from core.ids import SlotId
from engine.executor.interface import SlotAdded
from tests.figures import Figures
from tests.oracle import disagreements, smollm2
from tests.prompts import twenty_prompts
from tests.step_driver import GREEDY, StepDriver, work

TOLERANCE = 5e-4
NUM_TOKENS = 64
CHUNK_TOKENS = 512


@pytest.mark.slow
def test_logits_of_64_greedy_tokens_after_each_prompt(figures: Figures) -> None:
    oracle = smollm2()
    driver = StepDriver(oracle.path, num_blocks=540)
    sequences = [list(prompt.token_ids) for prompt in twenty_prompts()]
    for slot, tokens in enumerate(sequences):
        prefill(driver, slot, tokens)
    ours = torch.stack([decode(driver, sequences) for _ in range(NUM_TOKENS)], dim=1)
    driver.close()
    largest = 0.0
    for prompt, tokens, logits in zip(twenty_prompts(), sequences, ours, strict=True):
        reference = oracle.reference_logits(tokens[:-1], last=NUM_TOKENS)
        largest = max(largest, float((logits - reference).abs().max()))
        assert disagreements(logits, reference) == [], prompt.name
    figures(
        f"oracle, executor: {len(sequences)} prompts of 1 to 3,000 tokens, {NUM_TOKENS} tokens "
        f"each, teacher-forced: logits differ by at most {largest:.1e} (limit {TOLERANCE:.0e})"
    )
    assert largest <= TOLERANCE


def prefill(driver: StepDriver, slot: int, tokens: Sequence[int]) -> None:
    """Compute a prompt but for its last token, in chunks."""
    added = (driver.added(slot, tokens, room=NUM_TOKENS),)
    for start in range(0, len(tokens) - 1, CHUNK_TOKENS):
        driver.step(work(slot, min(CHUNK_TOKENS, len(tokens) - 1 - start)), added=added)
        added = ()
    if added:  # a prompt of one token has nothing to compute yet
        driver.step(added=added)


def decode(driver: StepDriver, sequences: Sequence[list[int]]) -> Tensor:
    """Compute each sequence's last token in one step, and append the most likely next one.

    A slot cannot be told a token that it did not sample, so each is added anew to its blocks.

    Returns:
        float32 [sequences, vocab_size].
    """
    slots = range(len(sequences))
    logits = driver.logits(
        *[work(slot, 1) for slot in slots],
        removed=tuple(SlotId(slot) for slot in slots),
        added=tuple(
            SlotAdded(
                SlotId(slot),
                list(tokens),
                len(tokens),
                len(tokens) - 1,
                (tuple(driver.tables[slot]),),
                GREEDY,
            )
            for slot, tokens in enumerate(sequences)
        ),
    )
    for tokens, token_id in zip(sequences, logits.argmax(dim=-1).tolist(), strict=True):
        tokens.append(token_id)
    return logits
