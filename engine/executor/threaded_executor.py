"""An executor in a thread of its own: the host schedules the next step while one is computed.

    caller    submit --> sample --> schedule, submit, sample ... --> collect
    thread          forward     draw, read back      |  forward ...

For executors that compute in the call. What a step raises comes out of its `collect`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from core.ids import SlotId
from core.kv_layout import KvLayout
from engine.executor.interface import Executor, Handle, StepPlan, StepResult


class _Step(NamedTuple):
    handle: Handle
    submitted: Future[Handle]
    finished: Future[StepResult]


class ThreadedExecutor:
    """Implements `engine.executor.interface.Executor` over another one.

    Args:
        executor: used by the thread alone from now on; `close` closes it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._submitted: Future[Handle] | None = None
        self._steps: deque[_Step] = deque()

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
        """Let the thread start a step once it has come to it."""
        self._submitted = self._thread.submit(self._executor.submit, plan)
        return Handle(plan.number)

    def sample(self, handle: Handle, masks: Mapping[SlotId, Any] | None = None) -> None:
        """Let the thread draw the submitted step's tokens."""
        if self._submitted is None:
            msg = f"sample({handle}): nothing was submitted since the last sample"
            raise ValueError(msg)
        finished = self._thread.submit(self._finish, handle, masks)
        self._steps.append(_Step(handle, self._submitted, finished))
        self._submitted = None

    def collect(self, handle: Handle) -> StepResult:
        """Wait for the oldest step."""
        step = self._steps.popleft()
        if step.handle != handle:
            msg = f"collect({handle}): step {step.handle} is the oldest"
            raise ValueError(msg)
        step.submitted.result()  # its own error, not what follows from it
        return step.finished.result()

    def close(self) -> None:
        """Let the thread finish what it has, then free the executor."""
        self._thread.shutdown(wait=True)
        self._executor.close()

    def _finish(self, handle: Handle, masks: Mapping[SlotId, Any] | None) -> StepResult:
        self._executor.sample(handle, masks)
        return self._executor.collect(handle)
