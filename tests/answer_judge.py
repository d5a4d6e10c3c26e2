"""Judges what a cluster generated greedily, by one forward pass of the reference a distinct answer.

The reference is teacher-forced on the answer's own ids. Where every id is its arg-max, the answer
is the reference's own greedy answer, by induction; where its two best logits nearly tie, either
may stand, and the ids after it are judged all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.oracle import REFERENCE_MARGIN, smollm2

LOGPROB_TOLERANCE = 1e-3
UNCLEAR_SHARE = 0.005
"""Of all positions, how many may have a margin below `REFERENCE_MARGIN`."""


class Answer(NamedTuple):
    """What came over the API for one prompt.

    Attributes:
        logprobs: of each token.
        best_logprobs: of the most likely token at each position.
    """

    name: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    best_logprobs: list[float]


class _Position(NamedTuple):
    """The reference at one position, given all ids before it.

    Attributes:
        best: its arg-max.
        margin: by how much the best logit exceeds the next.
        behind: by how much the best logit exceeds the answer's.
    """

    best: int
    margin: float
    behind: float
    logprob: float
    best_logprob: float


class Judge:
    """Keeps what the reference said, as axes that change nothing answer alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[tuple[list[int], list[_Position]]]] = {}

    def positions(self, prompt_ids: Sequence[int], token_ids: list[int]) -> list[_Position]:
        """Return the reference along an answer; an answer that begins one judged before is."""
        known = self._known.setdefault(tuple(prompt_ids), [])
        for judged_ids, positions in known:
            if judged_ids[: len(token_ids)] == token_ids:
                return positions[: len(token_ids)]
        known.append((token_ids, _reference(prompt_ids, token_ids)))
        return known[-1][1]


_JUDGE = Judge()


def judge(answers: Sequence[Answer], num_tokens: int) -> list[str]:
    """Assert that answers are the reference's.

    Returns:
        Lines to show: the largest difference, and each position at which the reference nearly ties.
    """
    unclear: list[str] = []
    differences: list[float] = []
    for answer in answers:
        assert len(answer.token_ids) == num_tokens, answer.name
        reference = _JUDGE.positions(answer.prompt_ids, answer.token_ids)
        for index, (token_id, position) in enumerate(zip(answer.token_ids, reference, strict=True)):
            where = f"{answer.name}, token {index}"
            if position.margin < REFERENCE_MARGIN:
                unclear.append(f"{where}: margin {position.margin:.1e}")
                assert position.behind < REFERENCE_MARGIN, where
            else:
                assert token_id == position.best, f"{where} of {answer.token_ids}"
            found = answer.logprobs[index] - position.logprob
            found_best = answer.best_logprobs[index] - position.best_logprob
            differences += [abs(found), abs(found_best)]
            assert differences[-1] <= LOGPROB_TOLERANCE, f"{where}: logprob off by {found_best}"
            assert differences[-2] <= LOGPROB_TOLERANCE, f"{where}: logprob off by {found}"
    total = num_tokens * len(answers)
    assert len(unclear) <= UNCLEAR_SHARE * total, unclear
    first = f"{total} tokens of {len(answers)} prompts equal the reference's; "
    first += f"logprobs differ by at most {max(differences):.1e}; {len(unclear)} positions unclear"
    return [first, *(f"  {line}" for line in unclear)]


def _reference(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[_Position]:
    fed = [*prompt_ids, *token_ids[:-1]]
    logits = smollm2().reference_logits(fed, last=len(token_ids))
    logprobs = logits.log_softmax(dim=-1)
    top = logits.topk(2, dim=-1)
    return [
        _Position(
            best=int(top.indices[row, 0]),
            margin=float(top.values[row, 0] - top.values[row, 1]),
            behind=float(top.values[row, 0] - logits[row, token_id]),
            logprob=float(logprobs[row, token_id]),
            best_logprob=float(logprobs[row].max()),
        )
        for row, token_id in enumerate(token_ids)
    ]
