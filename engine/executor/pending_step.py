"""A submitted step, how it moves its slots on, and what it tells the driver."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.request import TokenLogprobs
from engine.executor.compiled_program import Outputs
from engine.executor.interface import SlotResult, SlotWork, StepPlan
from engine.executor.slot_state import Slot, SlotState
from engine.executor.step_inputs import StepInputs
from engine.sampling.logprobs import to_host
from engine.sampling.read_back import floats, integers
from engine.sampling.sampler import Sampled


class PendingStep:
    """One step between submit and collect.

    Attributes:
        slots: host facts, one a work item; ids may name other sequences by the time of collect.
        sampled: tokens of the entries, on the device; None where nothing was sampled.
        num_accepted: int64 [1] per drafted work item, by its index in the plan.
    """

    def __init__(
        self,
        plan: StepPlan,
        slots: Sequence[Slot],
        inputs: StepInputs,
        outputs: Outputs | None,
        started: float,
    ) -> None:
        self.plan = plan
        self.slots = slots
        self.inputs = inputs
        self.outputs = outputs
        self.started = started
        self.sampled: Sampled | None = None
        self.is_sampled = False
        self.num_accepted: dict[int, Tensor] = {}

    def entries_by_work(self) -> list[range]:
        """Return which entries belong to each work item of the plan."""
        ranges: list[range] = []
        first = 0
        for work in self.plan.work:
            count = len(work.drafts) + 1 if work.drafts else work.num_samples
            count = count if work.num_samples else 0
            ranges.append(range(first, first + count))
            first += count
        return ranges


def advance(step: PendingStep, state: SlotState) -> None:
    """Append what was sampled and move the lengths on; no value leaves the device.

    Of several samples of one prompt the first is the slot's own; the others become slots of their
    own when the driver adds them.
    """
    step.is_sampled = True
    device = state.lengths.device
    plain: list[SlotWork] = []
    first_entries: list[int] = []
    with_token: list[int] = []
    for index, (work, entries) in enumerate(
        zip(step.plan.work, step.entries_by_work(), strict=True)
    ):
        step.slots[index].length += work.num_query
        if work.drafts and step.sampled is not None:
            tokens = step.sampled.token_ids[entries.start : entries.stop]
            step.num_accepted[index] = _verify(work, tokens, state)
            continue
        plain.append(work)
        if entries and step.sampled is not None:
            with_token.append(work.slot)
            first_entries.append(entries.start)
    slots = torch.tensor([work.slot for work in plain], dtype=torch.int64, device=device)
    counts = torch.tensor([work.num_query for work in plain], dtype=torch.int64, device=device)
    state.lengths.index_add_(0, slots, counts)
    if step.sampled is not None and with_token:
        slots = torch.tensor(with_token, device=device)
        tokens = step.sampled.token_ids[torch.tensor(first_entries, device=device)]
        state.token_ids[slots, state.lengths[slots]] = tokens


def _verify(work: SlotWork, tokens: Tensor, state: SlotState) -> Tensor:
    """Accept drafts while they equal the target's own sample; return how many tokens that gives.

    `tokens[i]` was drawn after draft i - 1, so it counts only if all drafts before it were right.
    Everything drawn is written; what follows the accepted part is overwritten by the next step.
    """
    device = tokens.device
    drafts = torch.tensor(work.drafts, device=device)
    num_right = (tokens[:-1] == drafts).long().cumprod(0).sum(0, keepdim=True)
    places = state.lengths[work.slot] + torch.arange(1, len(tokens) + 1, device=device)
    state.token_ids[work.slot, places] = tokens
    state.lengths[work.slot] += num_right[0] + 1
    return num_right + 1


def read_results(step: PendingStep) -> tuple[SlotResult, ...]:
    """Wait for the device; return results in the order of the plan's work."""
    tokens: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    if step.sampled is not None:
        tokens = integers(step.sampled.token_ids)
        logprobs = to_host(step.sampled.logprobs) if step.sampled.logprobs else {}
    results: list[SlotResult] = []
    for index, (work, entries) in enumerate(
        zip(step.plan.work, step.entries_by_work(), strict=True)
    ):
        accepted = entries
        if index in step.num_accepted:
            count = int(step.num_accepted[index])
            step.slots[index].length -= work.num_query - count
            accepted = entries[:count]
        results.append(
            SlotResult(
                slot=work.slot,
                token_ids=tuple(tokens[entry] for entry in accepted),
                logprobs=tuple(logprobs[entry] for entry in accepted if entry in logprobs),
                hidden=_hidden(step, index, accepted),
            )
        )
    return tuple(results)


def _hidden(step: PendingStep, index: int, accepted: range) -> list[float] | None:
    """Return the hidden state that the last accepted token was drawn from."""
    if not step.slots[index].return_hidden or not accepted or step.outputs is None:
        return None
    row = step.inputs.selected_of_entry[accepted[-1]]
    return floats(step.outputs.hidden[row])
