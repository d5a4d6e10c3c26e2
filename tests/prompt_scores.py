"""The oracle of the mock's prompt log-probabilities, and parts of them joined."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from core.request import EngineRequest, PromptLogprobs
from engine.executor.mock_tokens import marks_of, prompt_logprobs_of


def expected_scores(request: EngineRequest, vocab_size: int) -> PromptLogprobs:
    """Return what the mock says of a whole prompt of at least two tokens."""
    prompt, num_top = request.prompt, request.sampling.prompt_logprobs
    assert num_top is not None
    return prompt_logprobs_of(marks_of(prompt[:-1], 0), prompt, 1, num_top, vocab_size)


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Return consecutive parts as one; asserts that nothing is missing or told twice."""
    assert parts
    for before, after in pairwise(parts):
        assert after.start == before.end
    return PromptLogprobs(
        start=parts[0].start,
        chosen=tuple(value for part in parts for value in part.chosen),
        ranks=tuple(rank for part in parts for rank in part.ranks),
        num_top=parts[0].num_top,
        top_ids=tuple(token_id for part in parts for token_id in part.top_ids),
        top=tuple(value for part in parts for value in part.top),
    )
