"""One step of the native executor: told to the library, then read back."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from core.ids import SlotId
from core.request import PromptLogprobs, TokenLogprobs
from engine.executor.interface import SlotResult, SlotWork, StepPlan
from engine.executor.native_runner import Drawn
from engine.executor.native_sampling import PromptRun, PromptScores, Wish, address_of
from engine.executor.native_slots import NativeSlots
from engine.kernels.cpu.abi import StepInputs

Floats = npt.NDArray[np.float32]


class NativeStep:
    """A step between submit and collect.

    Args:
        plan: applied to the slots already.
        slots: not advanced by it yet; drafts are written here.
        hidden_size, vocab_size: of the model.
        selects_all: every row's logits are wanted, and nothing is drawn.

    Attributes:
        started, ended: when the executor came to it and had drawn its tokens, on its clock.
        is_sampled: whether its slots have moved on.
    """

    def __init__(
        self,
        plan: StepPlan,
        slots: NativeSlots,
        *,
        hidden_size: int,
        vocab_size: int,
        selects_all: bool = False,
    ) -> None:
        self.plan = plan
        self.started = self.ended = 0.0
        self.is_sampled = False
        self._selects_all = selects_all
        self._own = [slots.by_id[item.slot] for item in plan.work]
        work = array("i")
        for item in plan.work:
            work.extend((item.slot, item.num_query, item.num_samples, len(item.drafts)))
            if item.drafts:
                slots.propose(item.slot, item.drafts)
        self._work = work
        self._hidden: Floats | None = None
        if any(slot.return_hidden for slot in self._own):
            num_selected = sum(map(_num_selected, plan.work))
            self._hidden = np.empty((num_selected, hidden_size), np.float32)
        self._runs: dict[int, PromptRun] = {}
        if any(slot.prompt_logprobs is not None for slot in self._own):
            self._runs = self._prompt_runs(slots)
        self._scores = PromptScores([*self._runs.values()], vocab_size) if self._runs else None
        self._drawn = Drawn([], [], [])
        self._logprobs: Mapping[int, TokenLogprobs] = {}

    @property
    def num_rows(self) -> int:
        """Query tokens."""
        return sum(item.num_query for item in self.plan.work)

    def _prompt_runs(self, slots: NativeSlots) -> dict[int, PromptRun]:
        """Return what is to be scored, by work item."""
        runs: dict[int, PromptRun] = {}
        first_row = 0
        for index, (item, slot) in enumerate(zip(self.plan.work, self._own, strict=True)):
            start = slots.length_of(item.slot)
            last = min(start + item.num_query, slot.num_prompt - 1)
            if slot.prompt_logprobs is not None and last > start:
                tokens = slot.sequence.tokens[start + 1 : last + 1]
                runs[index] = PromptRun(first_row, start + 1, tokens, slot.prompt_logprobs)
            first_row += item.num_query
        return runs

    def fill(self, inputs: StepInputs) -> list[Any]:
        """Set what is this step's; return what it points to, to be kept until it has run."""
        plan = self.plan
        inputs.work, inputs.num_work = self._work.buffer_info()[0], len(plan.work)
        inputs.selects_all = self._selects_all
        kept: list[Any] = [self._work]
        inputs.num_zeroes = len(plan.zeroes)
        if plan.zeroes:
            kept.append(zeroes := np.array(plan.zeroes, np.int32))
            inputs.zeroes = address_of(zeroes)
        inputs.num_copies = len(plan.copies)
        if plan.copies:
            pairs = [(one.source, one.target) for one in plan.copies]
            kept.append(copies := np.array(pairs, np.int32))
            inputs.copies = address_of(copies)
        inputs.num_scores = len(self._runs)
        if self._scores is not None:
            inputs.scores = ctypes.addressof(self._scores.items)
        inputs.hidden = None if self._hidden is None else address_of(self._hidden)
        return kept

    def wishes(self, masks: Mapping[SlotId, Any], slots: NativeSlots) -> list[Wish]:
        """Return which of the step's draws ask for more than their slots say, and for what."""
        own = [
            index for index, slot in enumerate(self._own) if not slot.is_plain or slot.slot in masks
        ]
        if not own:
            return []
        work = self.plan.work
        ends = [*accumulate(map(_num_draws, work))]
        wishes: list[Wish] = []
        for index in own:
            item, slot = work[index], self._own[index]
            length = slots.length_of(item.slot) + item.num_query - len(item.drafts)
            for offset in range(_num_draws(item)):
                draw = ends[index] - _num_draws(item) + offset
                known = length + (offset if item.drafts else 0)
                wishes.append(Wish(draw, slot.sequence, known, masks.get(item.slot)))
        return wishes

    def finish(self, drawn: Drawn, logprobs: Mapping[int, TokenLogprobs]) -> None:
        """Take in what was drawn, and log-probabilities by the number of the draw."""
        self._drawn, self._logprobs = drawn, logprobs
        self.is_sampled = True

    def results(self) -> tuple[SlotResult, ...]:
        """Return what came of each work item."""
        tokens, firsts, ends = self._drawn
        if self._scores is None and self._hidden is None and not self._logprobs:
            return tuple(
                SlotResult(slot.slot, tuple(tokens[first:end]))
                for slot, first, end in zip(self._own, firsts, ends, strict=True)
            )
        scored: dict[int, PromptLogprobs] = {}
        if self._scores is not None:
            scored = dict(zip(self._runs, self._scores.results(), strict=True))
        return tuple(self._result(index, scored.get(index)) for index in range(len(self._own)))

    def _result(self, index: int, scored: PromptLogprobs | None) -> SlotResult:
        slot, drawn = self._own[index], self._drawn
        draws = range(drawn.firsts[index], drawn.ends[index])
        hidden: list[float] | None = None
        if self._hidden is not None and slot.return_hidden and draws:
            before = sum(map(_num_selected, self.plan.work[:index]))
            work = self.plan.work[index]
            hidden = self._hidden[before + (len(draws) - 1 if work.drafts else 0)].tolist()
        return SlotResult(
            slot=slot.slot,
            token_ids=tuple(drawn.tokens[draws.start : draws.stop]),
            logprobs=tuple(self._logprobs[draw] for draw in draws if draw in self._logprobs),
            hidden=hidden,
            prompt_logprobs=scored,
        )


def _num_selected(item: SlotWork) -> int:
    """Return how many rows a work item draws from."""
    return 1 + len(item.drafts) if item.num_samples else 0


def _num_draws(item: SlotWork) -> int:
    return item.num_samples * _num_selected(item)
