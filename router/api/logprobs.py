"""Log-probabilities in OpenAI's two shapes, and those of prompts in vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from core.request import PromptLogprobs, TokenLogprobs

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
        alternatives: dict[str, float] = {}
        for top_id, value in zip(entry.top_ids[:num_top], entry.top, strict=False):
            # Parts of characters look alike: the most likely one stays.
            alternatives.setdefault(token_of(top_id)[0], _finite(value))
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


def echo_logprobs(
    prompt: Sequence[int], parts: Sequence[PromptLogprobs], num_top: int, token_of: TokenOf
) -> tuple[dict[str, Any], int]:
    """Return `logprobs` of an echoed prompt, and the offset after it. Its first token has none.

    Args:
        parts: of all tokens but the first, in order.
    """
    entries = [TokenLogprobs(scored.chosen, scored.top_ids, scored.top) for scored in _each(parts)]
    first, _ = token_of(prompt[0])
    shape, offset = completion_logprobs(prompt[1:], entries, num_top, token_of, len(first))
    none = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [none[name], *values] for name, values in shape.items()}, offset


def prompt_logprobs(
    prompt: Sequence[int], parts: Sequence[PromptLogprobs], num_top: int, token_of: TokenOf
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: null for the first token, then by token id the actual token
    and `num_top` alternatives.

    Args:
        parts: of all tokens but the first, in order.
    """
    positions: list[dict[str, Any] | None] = [None]
    for token_id, scored in zip(prompt[1:], _each(parts), strict=True):
        ranked = zip(scored.top_ids, scored.top, range(1, num_top + 1), strict=False)
        found = {token_id: _ranked(token_id, scored.chosen, scored.rank, token_of)}
        for top_id, value, rank in ranked:
            found.setdefault(top_id, _ranked(top_id, value, rank, token_of))
        positions.append({str(one): shown for one, shown in found.items()})
    return positions


class _Scored(NamedTuple):
    """One prompt token."""

    chosen: float
    rank: int
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


def _each(parts: Sequence[PromptLogprobs]) -> Iterator[_Scored]:
    for part in parts:
        count = part.num_top
        for at, (chosen, rank) in enumerate(zip(part.chosen, part.ranks, strict=True)):
            own = slice(at * count, (at + 1) * count)
            yield _Scored(chosen, rank, part.top_ids[own], part.top[own])


def _ranked(token_id: int, logprob: float, rank: int, token_of: TokenOf) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_of(token_id)[0]}


def _entry(token_id: int, logprob: float, token_of: TokenOf) -> dict[str, Any]:
    text, raw = token_of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
