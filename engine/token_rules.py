"""When a sample ends and what may not follow, by its token ids alone; stop strings belong to the
router."""

from __future__ import annotations

from collections.abc import Sequence

from core.request import FinishReason
from core.sampling_params import SamplingParams


def finish_reason(
    token_id: int, num_generated: int, sampling: SamplingParams
) -> FinishReason | None:
    """Return why a sample ends with `token_id`, or None.

    Args:
        token_id: the newest token.
        num_generated: generated tokens, this one included.
        sampling: EOS and stop tokens count once `min_tokens` tokens came before.
    """
    if num_generated > sampling.min_tokens and sampling.ends_with(token_id):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_generated >= sampling.max_tokens else None


def end_of(outputs: Sequence[int], sampling: SamplingParams) -> FinishReason | None:
    """Return why a sample with these generated tokens has ended already, or None."""
    return finish_reason(outputs[-1], len(outputs), sampling) if outputs else None


def accept(
    token_ids: Sequence[int], num_generated: int, sampling: SamplingParams
) -> tuple[int, FinishReason | None]:
    """Return how many of the next tokens belong to a sample, and why it ends with the last.

    Args:
        token_ids: what a step sampled, in order.
        num_generated: tokens generated before.
    """
    for count, token_id in enumerate(token_ids, start=1):
        reason = finish_reason(token_id, num_generated + count, sampling)
        if reason is not None:
            return count, reason
    return len(token_ids), None


def completing_ids(bad_words: Sequence[Sequence[int]], generated: Sequence[int]) -> frozenset[int]:
    """Return the ids that would complete a bad word after these generated tokens.

    A word of one token is always about to be completed; the prompt never begins one (vLLM's rule).
    """
    return frozenset(
        word[-1]
        for word in bad_words
        if len(word) <= len(generated) + 1
        and tuple(generated[len(generated) + 1 - len(word) :]) == tuple(word[:-1])
    )
