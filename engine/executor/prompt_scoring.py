"""Which rows of a step score prompt tokens, and their scores, a slice of logits at a time.

A row's logits say how likely the next token was. The last row of a prompt has none to score: what
follows is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from core.ids import SlotId
from core.request import PromptLogprobs
from engine.executor.interface import SlotWork
from engine.executor.slot_state import SlotState
from engine.executor.step_rows import StepRows
from engine.sampling.prompt_logprobs import PromptScores, joined, score, to_host

SLICE_ROWS = 64
"""Rows whose logits exist at once: 13 MB of a vocabulary of 49,152, where a chunk of 4,096 tokens
would take 800 MB."""

LogitsOfRows = Callable[[Tensor], Tensor]
"""From rows of the step, int64 [rows], to their float32 [rows, vocab_size]."""


class PromptRows(NamedTuple):
    """What one work item scores.

    Attributes:
        work: its index in the plan.
        rows: of the step, one before each token to score.
        start: index in the prompt of the first token to score.
        num_top: alternatives.
    """

    work: int
    slot: SlotId
    rows: range
    start: int
    num_top: int


class PromptScoring:
    """A step's scores: rows are chosen before it runs, scored while it does, read after it.

    Args:
        work: the plan's.
        rows: of the step.
        state: the slots, not advanced by this step yet.

    Attributes:
        wanted: what the step scores; nothing where no slot asks.
    """

    def __init__(self, work: Sequence[SlotWork], rows: StepRows, state: SlotState) -> None:
        self._state = state
        self._scores: list[PromptScores] = []
        self.wanted: list[PromptRows] = []
        for index, (item, own) in enumerate(zip(work, rows.by_work, strict=True)):
            slot = state.by_id[item.slot]
            start = slot.length + 1
            count = min(item.num_query, slot.num_prompt - start)
            if slot.prompt_logprobs is not None and count > 0:
                wanted = PromptRows(index, item.slot, own[:count], start, slot.prompt_logprobs)
                self.wanted.append(wanted)

    def score(self, logits_of: LogitsOfRows) -> None:
        """Score everything that is wanted; the results stay on the device."""
        self._scores = [self._score(one, logits_of) for one in self.wanted]

    def _score(self, wanted: PromptRows, logits_of: LogitsOfRows) -> PromptScores:
        end = wanted.start + len(wanted.rows)
        tokens = self._state.token_ids[wanted.slot, wanted.start : end]
        parts: list[PromptScores] = []
        for first in range(0, len(wanted.rows), SLICE_ROWS):
            part = wanted.rows[first : first + SLICE_ROWS]
            rows = torch.arange(part.start, part.stop, device=tokens.device)
            own = tokens[first : first + len(part)]
            parts.append(score(logits_of(rows), own, wanted.num_top))
        return joined(parts)

    def tensors(self) -> list[Tensor]:
        """Return what the host needs."""
        return [tensor for scores in self._scores for tensor in scores]

    def on_host(self, values: Iterator[Tensor]) -> dict[int, PromptLogprobs]:
        """Return the scores by work item.

        Args:
            values: `tensors` on the CPU; what follows them is left in the iterator.
        """
        num_columns = len(PromptScores._fields)
        return {
            one.work: to_host(PromptScores(*islice(values, num_columns)), one.start)
            for one in self.wanted
        }
