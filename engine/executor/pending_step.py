"""A submitted step, how it moves its slots on, and what it tells the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from core.request import TokenLogprobs
from engine.executor.compiled_program import Outputs
from engine.executor.interface import SlotResult, StepPlan
from engine.executor.prompt_scoring import PromptScoring
from engine.executor.slot_state import Slot, SlotState
from engine.executor.step_inputs import StepInputs, num_entries
from engine.sampling.logprobs import to_host
from engine.sampling.read_back import ReadBack, integers, table
from engine.sampling.sampler import Sampled


class PendingStep:
    """One step between submit and collect.

    Attributes:
        slots: host facts, one a work item; ids may name other sequences by the time of collect.
        sampled: tokens of the entries, on the device; None where nothing was sampled.
        num_accepted: int64 [1] per drafted work item, by its index in the plan.
        reading: what collect waits for; None until the step was sampled.
    """

    def __init__(
        self,
        plan: StepPlan,
        slots: Sequence[Slot],
        inputs: StepInputs,
        outputs: Outputs | None,
        scoring: PromptScoring,
        started: float,
    ) -> None:
        self.plan = plan
        self.slots = slots
        self.inputs = inputs
        self.outputs = outputs
        self.scoring = scoring
        self.started = started
        self.sampled: Sampled | None = None
        self.num_accepted: dict[int, Tensor] = {}
        self.reading: ReadBack | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether its slots have moved on."""
        return self.reading is not None

    def entries_by_work(self) -> list[range]:
        """Return which entries belong to each work item of the plan."""
        ranges: list[range] = []
        first = 0
        for work in self.plan.work:
            ranges.append(range(first, first + num_entries(work)))
            first = ranges[-1].stop
        return ranges

    @property
    def returns_hidden(self) -> bool:
        """Whether any of its slots wants the hidden state."""
        return any(slot.return_hidden for slot in self.slots)


def advance(step: PendingStep, state: SlotState) -> None:
    """Append what was sampled and move the lengths on; no value leaves the device."""
    slots, counts, drawn_slots, drawn_entries = step.inputs.advance
    state.lengths.index_add_(0, slots, counts)
    for slot, work in zip(step.slots, step.plan.work, strict=True):
        slot.length += work.num_query
    if step.sampled is not None:
        tokens = step.sampled.token_ids
        state.token_ids[drawn_slots, state.lengths[drawn_slots]] = tokens[drawn_entries]
        for index, entries in enumerate(step.entries_by_work()):
            if step.plan.work[index].drafts:
                own = tokens[entries.start : entries.stop]
                step.num_accepted[index] = _verify(step, index, own, state)
    step.reading = ReadBack(_to_read(step), state.lengths.device)


def _verify(step: PendingStep, index: int, tokens: Tensor, state: SlotState) -> Tensor:
    """Accept drafts while they equal the target's own sample; return how many tokens that gives.

    `tokens[i]` was drawn after draft i - 1, so it counts only if all drafts before it were right.
    Everything drawn is written; what follows the accepted part is overwritten by the next step.
    """
    slot, rows = step.plan.work[index].slot, step.inputs.rows.by_work[index]
    drafts = step.inputs.token_ids[rows.start + 1 : rows.stop]
    num_right = (tokens[:-1] == drafts).long().cumprod(0).sum(0, keepdim=True)
    places = state.lengths[slot] + torch.arange(1, len(tokens) + 1, device=tokens.device)
    state.token_ids[slot, places] = tokens
    state.lengths[slot] += num_right[0] + 1
    return num_right + 1


def _to_read(step: PendingStep) -> list[Tensor]:
    """List what `read_results` takes, in its order."""
    tensors = step.scoring.tensors()
    if step.sampled is None or step.outputs is None:
        return tensors
    tensors.append(step.sampled.token_ids)
    if step.num_accepted:
        tensors.append(torch.cat([*step.num_accepted.values()]))
    if step.returns_hidden:
        tensors.append(step.outputs.hidden)
    if step.sampled.logprobs is not None:
        tensors += [*step.sampled.logprobs.tensors()]
    return tensors


def read_results(step: PendingStep) -> tuple[SlotResult, ...]:
    """Wait for the device; return results in the order of the plan's work."""
    assert step.reading is not None
    values = iter(step.reading.wait())
    scored = step.scoring.on_host(values)
    if step.sampled is None:
        return tuple(
            SlotResult(work.slot, (), prompt_logprobs=scored.get(index))
            for index, work in enumerate(step.plan.work)
        )
    tokens = integers(next(values))
    accepted = _accepted(step, values)
    hidden = table(next(values)) if step.returns_hidden else []
    logprobs: dict[int, TokenLogprobs] = {}
    if step.sampled.logprobs is not None:
        logprobs = to_host(step.sampled.logprobs.on_host(*values))
    results: list[SlotResult] = []
    work_items = zip(step.slots, step.plan.work, accepted, strict=True)
    for index, (slot, work, entries) in enumerate(work_items):
        wants_hidden = slot.return_hidden and len(entries) > 0
        results.append(
            SlotResult(
                slot=work.slot,
                token_ids=tuple(tokens[entry] for entry in entries),
                logprobs=tuple(logprobs[entry] for entry in entries if entry in logprobs),
                hidden=hidden[step.inputs.selected_of_entry[entries[-1]]] if wants_hidden else None,
                prompt_logprobs=scored.get(index),
            )
        )
    return tuple(results)


def _accepted(step: PendingStep, values: Iterator[Tensor]) -> list[range]:
    """Return the entries of each work item that count; take back what its rejected drafts added."""
    entries = step.entries_by_work()
    if step.num_accepted:
        counts = integers(next(values))
        for index, count in zip(step.num_accepted, counts, strict=True):
            step.slots[index].length -= step.plan.work[index].num_query - count
            entries[index] = entries[index][:count]
    return entries
