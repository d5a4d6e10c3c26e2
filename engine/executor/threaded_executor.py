"""An executor in a thread of its own: the host schedules the next step while one is computed.

    caller    submit, sample --> schedule, submit, sample ... --> collect
    thread          forward, draw, read back | forward, draw ...

For executors that compute in the call. What a step raises comes out of its `collect`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple

from core.ids import SlotId
from core.kv_layout import KvLayout
from engine.executor.interface import Executor, Handle, StepPlan, StepResult


class _Step(NamedTuple):
    plan: StepPlan
    masks: Mapping[SlotId, Any] | None


class ThreadedExecutor:
    """Implements `engine.executor.interface.Executor` over another one.

    A step goes through one queue each way: between two steps the thread does nothing else.

    Args:
        executor: used by the thread alone from now on; `close` closes it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._submitted: StepPlan | None = None
        self._expected: deque[Handle] = deque()
        self._steps: SimpleQueue[_Step | None] = SimpleQueue()
        self._finished: SimpleQueue[StepResult | Exception] = SimpleQueue()
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
        """Take a step; the thread comes to it once it is to be sampled."""
        self._submitted = plan
        return Handle(plan.number)

    def sample(self, handle: Handle, masks: Mapping[SlotId, Any] | None = None) -> None:
        """Let the thread compute the submitted step and draw its tokens."""
        plan = self._submitted
        if plan is None or plan.number != handle:
            msg = f"sample({handle}): nothing was submitted since the last sample"
            raise ValueError(msg)
        self._submitted = None
        self._expected.append(handle)
        self._steps.put(_Step(plan, masks))

    def collect(self, handle: Handle) -> StepResult:
        """Wait for the oldest step."""
        if self._expected[0] != handle:
            msg = f"collect({handle}): step {self._expected[0]} is the oldest"
            raise ValueError(msg)
        self._expected.popleft()
        result = self._finished.get()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Let the thread finish what it has, then free the executor."""
        self._steps.put(None)
        self._thread.join()
        self._executor.close()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._finished.put(self._result_of(step))
            except Exception as error:  # noqa: BLE001 - of the caller, who collects it
                self._finished.put(error)

    def _result_of(self, step: _Step) -> StepResult:
        handle = self._executor.submit(step.plan)
        self._executor.sample(handle, step.masks)
        return self._executor.collect(handle)
