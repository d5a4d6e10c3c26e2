"""One step of the native executor: laid out as the library wants it, then read back."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from core.ids import SlotId
from core.request import PromptLogprobs, TokenLogprobs
from engine.executor.interface import SlotResult, SlotWork, StepPlan
from engine.executor.native_sampling import Draw, Draws, PromptRun, PromptScores
from engine.executor.native_slots import NativeSlot, NativeSlots
from engine.kernels.cpu.abi import StepInputs

Floats = npt.NDArray[np.float32]


class NativeStep:
    """A step between submit and collect.

    Args:
        plan: applied to the slots already.
        slots: not advanced by it yet; drafts are written here.
        started: when it was submitted, on the executor's clock.
        hidden_size, vocab_size: of the model.
        select_all: every row's logits are wanted, and nothing is drawn.

    Attributes:
        is_sampled: whether its slots have moved on.
        num_rows: query tokens.
        num_selected: rows whose logits are there after its forward pass.
    """

    def __init__(
        self,
        plan: StepPlan,
        slots: NativeSlots,
        *,
        started: float,
        hidden_size: int,
        vocab_size: int,
        select_all: bool = False,
    ) -> None:
        self.plan = plan
        self.started = started
        self.is_sampled = False
        self.num_rows = 0
        self._slots = slots
        self._own = [slots.by_id[item.slot] for item in plan.work]
        self._work = array("i")
        self._selected = array("i")
        self._draws: list[Draw] = []
        self._entries: list[range] = []
        self._runs: dict[int, PromptRun] = {}
        for index, (item, slot) in enumerate(zip(plan.work, self._own, strict=True)):
            self._lay_out(index, item, slot)
        if select_all:
            self._selected = array("i", range(self.num_rows))
        self.num_selected = len(self._selected)
        self._hidden: Floats | None = None
        if self.num_selected and any(slot.return_hidden for slot in self._own):
            self._hidden = np.empty((self.num_selected, hidden_size), np.float32)
        self._scores = PromptScores([*self._runs.values()], vocab_size) if self._runs else None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs | None] = []

    def _lay_out(self, index: int, item: SlotWork, slot: NativeSlot) -> None:
        start, end = slot.length, slot.length + item.num_query
        first_entry, token_ids = len(self._draws), slot.sequence.tokens
        self._work.extend((item.slot, start, item.num_query))
        if item.drafts:
            token_ids[start + 1 : end] = item.drafts
        if item.num_samples:
            self._lay_out_draws(item, slot)
        self._entries.append(range(first_entry, len(self._draws)))
        last = min(end, slot.num_prompt - 1)
        if slot.prompt_logprobs is not None and last > start:
            tokens = token_ids[start + 1 : last + 1]
            run = PromptRun(self.num_rows, start + 1, tokens, slot.prompt_logprobs)
            self._runs[index] = run
        self.num_rows += item.num_query

    def _lay_out_draws(self, item: SlotWork, slot: NativeSlot) -> None:
        """A draft's successor is drawn as if the draft were right."""
        count = item.num_query if item.drafts else 1
        end = slot.length + item.num_query
        first_row = self.num_rows + item.num_query - count
        sequence = slot.sequence
        for offset in range(count):
            row = len(self._selected)
            self._selected.append(first_row + offset)
            num_tokens = end - count + 1 + offset
            if item.drafts or item.num_samples == 1:
                self._draws.append(Draw(row, sequence, num_tokens))
            else:
                self._draws += [
                    Draw(row, sequence.as_sample(sample), num_tokens)
                    for sample in range(item.num_samples)
                ]

    def fill(self, inputs: StepInputs) -> list[Any]:
        """Set what is this step's; return what it points to, to be kept until it has run."""
        plan = self.plan
        inputs.work, inputs.num_work = self._work.buffer_info()[0], len(plan.work)
        kept: list[Any] = [self._work, self._selected]
        inputs.selected, inputs.num_selected = self._selected.buffer_info()
        inputs.num_zeroes = len(plan.zeroes)
        if plan.zeroes:
            kept.append(zeroes := np.array(plan.zeroes, np.int32))
            inputs.zeroes = zeroes.ctypes.data
        inputs.num_copies = len(plan.copies)
        if plan.copies:
            pairs = [(one.source, one.target) for one in plan.copies]
            kept.append(copies := np.array(pairs, np.int32))
            inputs.copies = copies.ctypes.data
        inputs.num_scores = len(self._runs)
        if self._scores is not None:
            inputs.scores = ctypes.addressof(self._scores.items)
        inputs.hidden = None if self._hidden is None else self._hidden.ctypes.data
        return kept

    def draws(self, masks: Mapping[SlotId, Any]) -> Draws | None:
        """Return what is to be drawn from the logits; None: nothing."""
        if not self._draws:
            return None
        if masks:
            self._mask(masks)
        return Draws(self._draws)

    def _mask(self, masks: Mapping[SlotId, Any]) -> None:
        for slot, entries in zip(self._own, self._entries, strict=True):
            if slot.slot in masks:
                for entry in entries:
                    draw = self._draws[entry]
                    self._draws[entry] = draw._replace(allowed=masks[slot.slot])

    def advance(self, drawn: Draws | None) -> None:
        """Append what was drawn and move the lengths on."""
        if drawn is not None:
            self._tokens, self._logprobs = drawn.token_ids(), drawn.logprobs()
        for index, (item, slot) in enumerate(zip(self.plan.work, self._own, strict=True)):
            entries = self._entries[index]
            if item.drafts and entries:
                self._entries[index] = self._verify(item, slot, entries)
                continue
            slot.length += item.num_query
            if entries:
                # Of several samples the first is the slot's own; the others become slots when the
                # driver adds them.
                slot.sequence.tokens[slot.length] = self._tokens[entries.start]
        self.is_sampled = True

    def _verify(self, item: SlotWork, slot: NativeSlot, entries: range) -> range:
        """Accept drafts while they equal the target's own draws; return the entries that count.

        The entry after a draft was drawn as if that were right, so it counts only if it was.
        Everything drawn is written; what follows the accepted part is overwritten by the next step.
        """
        tokens = self._tokens[entries.start : entries.stop]
        num_right = 0
        while num_right < len(item.drafts) and tokens[num_right] == item.drafts[num_right]:
            num_right += 1
        first = slot.length + 1
        slot.sequence.tokens[first : first + len(tokens)] = tokens
        slot.length += num_right + 1
        return entries[: num_right + 1]

    def results(self) -> tuple[SlotResult, ...]:
        """Return what came of each work item."""
        if self._scores is None and self._hidden is None and not any(self._logprobs):
            return tuple(
                SlotResult(slot.slot, tuple(self._tokens[entries.start : entries.stop]))
                for slot, entries in zip(self._own, self._entries, strict=True)
            )
        scored: dict[int, PromptLogprobs] = {}
        if self._scores is not None:
            scored = dict(zip(self._runs, self._scores.results(), strict=True))
        return tuple(self._result(index, scored.get(index)) for index in range(len(self._own)))

    def _result(self, index: int, scored: PromptLogprobs | None) -> SlotResult:
        slot, entries = self._own[index], self._entries[index]
        logprobs = self._logprobs[entries.start : entries.stop]
        hidden: list[float] | None = None
        if self._hidden is not None and slot.return_hidden and entries:
            hidden = self._hidden[self._draws[entries[-1]].row].tolist()
        return SlotResult(
            slot=slot.slot,
            token_ids=tuple(self._tokens[entries.start : entries.stop]),
            logprobs=tuple(one for one in logprobs if one is not None),
            hidden=hidden,
            prompt_logprobs=scored,
        )
