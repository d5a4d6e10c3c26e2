"""Submitted steps in order: which plan may come, which is to be sampled, which is collected."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from engine.executor.interface import Handle, StepPlan


class QueuedStep(Protocol):
    """What the queue asks of a step."""

    @property
    def plan(self) -> StepPlan:
        """What it does."""
        ...

    @property
    def is_sampled(self) -> bool:
        """Whether its slots have moved on."""
        ...


StepT = TypeVar("StepT", bound=QueuedStep)


class StepQueue(Generic[StepT]):
    """Steps between submit and collect, of one executor.

    `take` may run beside the other methods, in another thread.
    """

    def __init__(self) -> None:
        self._steps: deque[StepT] = deque()
        self._newest: StepT | None = None
        self._next = 0

    def admit(self, plan: StepPlan) -> None:
        """Count a plan that is about to run.

        Raises:
            ValueError: it is not the next, or the one before was not sampled yet.
        """
        if plan.number != self._next:
            msg = f"plan {plan.number}: {self._next} is the next, without gaps"
            raise ValueError(msg)
        if self._newest is not None and not self._newest.is_sampled:
            msg = f"plan {plan.number}: step {self._newest.plan.number} was not sampled yet"
            raise ValueError(msg)
        self._next += 1

    def put(self, step: StepT) -> Handle:
        """Append the step of the admitted plan."""
        self._newest = step
        self._steps.append(step)
        return Handle(step.plan.number)

    def to_sample(self, handle: Handle) -> StepT:
        """Return the newest step.

        Raises:
            ValueError: that is another one, or sampled already.
        """
        step = self._newest
        if step is None or step.plan.number != handle or step.is_sampled:
            number = "none" if step is None else f"step {step.plan.number}"
            msg = f"sample({handle}): {number} is the one to sample, once"
            raise ValueError(msg)
        return step

    def take(self, handle: Handle) -> StepT:
        """Remove and return the oldest step.

        Raises:
            ValueError: that is another one, or not sampled yet.
        """
        step = self._steps.popleft()
        if step.plan.number != handle or not step.is_sampled:
            msg = f"collect({handle}): step {step.plan.number} is the oldest, and must be sampled"
            raise ValueError(msg)
        return step

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()
        self._newest = None
