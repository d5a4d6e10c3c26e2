"""What of an answer is lost, wrong or repeated, by the oracle.

lost      a client that stayed has no whole answer: an error, silence, a choice without its end, or
          a gap in its tokens
repeated  tokens, an end or a usage were told more than once
wrong     anything else that the oracle does not say
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.chaos_client import Answered, Told
from tests.chaos_requests import Expected, Request


class Kind(enum.StrEnum):
    """What can be wrong with an answer."""

    LOST = "lost"
    WRONG = "wrong"
    REPEATED = "repeated"


class Fault(NamedTuple):
    """One thing that should not be."""

    kind: Kind
    text: str


def judge(request: Request, answered: Answered) -> list[Fault]:
    """Return what is wrong with an answer, or with what came of it before its client left; what
    explains the rest stands first."""
    if answered.has_left:
        return [fault for at in answered.told for fault in _partly(request, answered, at)]
    if answered.status != 200 or answered.error or not answered.num_ends:
        return [Fault(Kind.LOST, f"{answered.status}, {answered.error or 'no end'}")]
    choices = range(request.num_choices)
    faults = [fault for at in choices for fault in _wholly(request, answered, at)]
    if answered.told.keys() - set(choices):
        faults.append(Fault(Kind.WRONG, f"choices {sorted(answered.told)}"))
    if answered.num_ends > 1:
        faults.append(Fault(Kind.REPEATED, f"{answered.num_ends} ends"))
    return [*faults, *_judge_usage(request, answered)]


def _partly(request: Request, answered: Answered, index: int) -> Iterator[Fault]:
    if index >= request.num_choices:
        yield Fault(Kind.WRONG, f"choice {index} of {request.num_choices}")
        return
    told, right = answered.told[index], request.expected[index]
    if told.prompt and told.prompt != right.prompt:
        yield Fault(Kind.WRONG, f"choice {index}: another prompt")
    if tuple(told.token_ids) != right.token_ids[: len(told.token_ids)]:
        yield _judge_tokens(told.token_ids, right.token_ids, index)
    yield from _judge_logprobs(request, told, right, index)


def _wholly(request: Request, answered: Answered, index: int) -> Iterator[Fault]:
    told, right = answered.told.get(index), request.expected[index]
    if told is None:
        yield Fault(Kind.LOST, f"no choice {index}")
        return
    if told.prompt != right.prompt:
        yield Fault(Kind.WRONG, f"choice {index}: another prompt")
    if tuple(told.token_ids) != right.token_ids:
        yield _judge_tokens(told.token_ids, right.token_ids, index)
    yield from _judge_logprobs(request, told, right, index)
    if told.finish_reasons != [right.finish_reason]:
        kind = {0: Kind.LOST, 1: Kind.WRONG}.get(len(told.finish_reasons), Kind.REPEATED)
        yield Fault(kind, f"choice {index}: finish reasons {told.finish_reasons}")
    if tuple(told.token_ids) == right.token_ids and told.text != right.text:
        yield Fault(Kind.WRONG, f"choice {index}: text {told.text!r} for {right.text!r}")


def _judge_tokens(told: Sequence[int], right: tuple[int, ...], index: int) -> Fault:
    pairs = enumerate(zip(told, right, strict=False))
    at = next((k for k, (one, other) in pairs if one != other), min(len(told), len(right)))
    rest = tuple(told[at:])
    kind = _kind_of_difference(rest, right, at) if rest else Kind.LOST
    where = f"{len(told)} tokens for {len(right)}, from {at} on"
    return Fault(kind, f"choice {index}: {where} {rest} for {right[at:]}")


def _kind_of_difference(rest: tuple[int, ...], right: tuple[int, ...], at: int) -> Kind:
    """Return what became of token `at`: the answer went on with an earlier one, or a later one."""
    spans = [right[start : start + 3] for start in range(len(right))]
    starts = [start for start, span in enumerate(spans) if span == rest[: len(span)]]
    if not starts:
        return Kind.WRONG
    return Kind.REPEATED if min(starts) < at else Kind.LOST


def _judge_logprobs(request: Request, told: Told, right: Expected, index: int) -> Iterator[Fault]:
    if request.body.get("logprobs") is None:
        return
    num_echoed = len(right.logprobs) - len(right.token_ids)
    expected = list(right.logprobs[: num_echoed + len(told.token_ids)])
    if told.logprobs != expected:
        yield Fault(Kind.WRONG, f"choice {index}: log-probabilities {told.logprobs} for {expected}")


def _judge_usage(request: Request, answered: Answered) -> Iterator[Fault]:
    if request.is_stream and not request.body.get("stream_options"):
        return
    completion = sum(len(one.token_ids) for one in request.expected)
    prompt = sum(map(len, request.prompts))
    said = answered.usage or {}
    if (said.get("prompt_tokens"), said.get("completion_tokens")) != (prompt, completion):
        yield Fault(Kind.WRONG, f"usage {said} for {prompt} and {completion}")
