"""An executor in a thread of its own: the host schedules the next step while one is computed.

    caller    lay out, submit, sample --> collect, schedule --> lay out, submit, sample ...
    thread             forward, draw | forward, draw | ...

For executors that compute in the call. What a step raises comes out of its `collect`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from core.ids import SlotId
from core.kv_layout import KvLayout
from engine.executor.interface import Executor, Handle, StepPlan, StepResult


class PreparingExecutor(Executor, Protocol):
    """An executor whose `collect` and `prepare` may run in another thread than the rest."""

    def prepare(self, plan: StepPlan) -> Any:
        """Do what of the next plan's `submit` may be done while the last one runs."""
        ...

    def submit_prepared(self, plan: StepPlan, prepared: Any) -> Handle:
        """Start a step with what `prepare` returned."""
        ...


class _Step(NamedTuple):
    plan: StepPlan
    prepared: Any
    masks: Mapping[SlotId, Any] | None


class ThreadedExecutor:
    """Implements `engine.executor.interface.Executor` over another one.

    A step goes through one queue each way: between two steps the thread does little else.

    Args:
        executor: used by this alone from now on; `close` closes it.
    """

    def __init__(self, executor: PreparingExecutor) -> None:
        self._executor = executor
        self._submitted: tuple[StepPlan, Any] | None = None
        self._expected: deque[Handle] = deque()
        self._steps: SimpleQueue[_Step | None] = SimpleQueue()
        self._finished: SimpleQueue[Exception | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    @property
    def layout(self) -> KvLayout:
        """Layout of the blocks it reads and writes."""
        return self._executor.layout

    @property
    def num_blocks(self) -> int:
        """Blocks that its region holds."""
        return self._executor.num_blocks

    @property
    def numerics(self) -> str:
        """Id of everything that can change a token."""
        return self._executor.numerics

    def submit(self, plan: StepPlan) -> Handle:
        """Lay a step out if possible; the thread comes to it once it is to be sampled."""
        self._submitted = (plan, self._executor.prepare(plan))
        return Handle(plan.number)

    def sample(self, handle: Handle, masks: Mapping[SlotId, Any] | None = None) -> None:
        """Let the thread compute the submitted step and draw its tokens."""
        plan, prepared = self._submitted or (None, None)
        if plan is None or plan.number != handle:
            msg = f"sample({handle}): nothing was submitted since the last sample"
            raise ValueError(msg)
        self._submitted = None
        self._expected.append(handle)
        self._steps.put(_Step(plan, prepared, masks))

    def collect(self, handle: Handle) -> StepResult:
        """Wait for the oldest step."""
        if self._expected[0] != handle:
            msg = f"collect({handle}): step {self._expected[0]} is the oldest"
            raise ValueError(msg)
        self._expected.popleft()
        error = self._finished.get()
        if error is not None:
            raise error
        return self._executor.collect(handle)

    def close(self) -> None:
        """Let the thread finish what it has, then free the executor."""
        self._steps.put(None)
        self._thread.join()
        self._executor.close()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                handle = self._executor.submit_prepared(step.plan, step.prepared)
                self._executor.sample(handle, step.masks)
                self._finished.put(None)
            except Exception as error:  # noqa: BLE001 - of the caller, who collects it
                self._finished.put(error)
