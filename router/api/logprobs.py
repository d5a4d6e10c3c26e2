"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from core.request import TokenLogprobs

TokenOf = Callable[[int], tuple[str, bytes]]
"""One token id's (text, bytes)."""

_FLOOR = -9999.0
"""JSON has no -inf; vLLM writes this for a token that a mask made impossible."""


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int, token_of: TokenOf
) -> dict[str, Any]:
    """Return `logprobs` of a chat choice for these tokens, `num_top` alternatives each."""
    content = [
        {
            **_entry(token_id, entry.chosen, token_of),
            "top_logprobs": [
                _entry(top_id, value, token_of)
                for top_id, value in zip(entry.top_ids[:num_top], entry.top, strict=False)
            ],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    num_top: int,
    token_of: TokenOf,
    offset: int,
) -> tuple[dict[str, Any], int]:
    """Return `logprobs` of a completion choice for these tokens, and the offset after them.

    Args:
        offset: where the first of these tokens begins, in characters of the choice's tokens joined.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    top: list[dict[str, float]] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text, _ = token_of(token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        alternatives = {
            token_of(top_id)[0]: _finite(value)
            for top_id, value in zip(entry.top_ids[:num_top], entry.top, strict=False)
        }
        # The chosen token always stands there, so that there may be one more than was asked for.
        alternatives.setdefault(text, _finite(entry.chosen))
        top.append(alternatives)
    shape: dict[str, Any] = {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.chosen) for entry in logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }
    return shape, offset


def _entry(token_id: int, logprob: float, token_of: TokenOf) -> dict[str, Any]:
    text, raw = token_of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
