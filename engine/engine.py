"""The step loop of one replica: decisions of the scheduler, arithmetic of the executor.

    step:  schedule -> submit, sample          while fewer than max_inflight steps are in flight
           collect  -> apply                   when that many are, or nothing more can be scheduled

With max_inflight = 1 a step is synchronous; with 2 the host schedules the next step while the
device computes. Runs on the engine's own thread (`engine.engine_thread`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from core.config import EngineConfig
from core.ids import HandoffId, RequestId
from core.request import EngineRequest
from engine.events import EngineStats, Event, Mode
from engine.executor.interface import Executor, Handle, StepPlan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.settings import Drafter, SchedulerSettings
from engine.speed import StepSpeeds


def settings_for(
    executor: Executor,
    config: EngineConfig,
    *,
    max_model_len: int,
    max_receiving_share: float,
    vocab_size: int | None = None,
) -> SchedulerSettings:
    """Return the scheduler's limits for an executor's pool and a worker's configuration.

    Args:
        max_model_len: tokens of prompt and output together; cut to what the pool holds.
        max_receiving_share: `KvTransferConfig.max_receiving_share`.
        vocab_size: of the model.
    """
    return SchedulerSettings(
        num_blocks=executor.num_blocks,
        block_size=executor.layout.block_size,
        chunk_tokens=config.chunk_tokens,
        max_slots=config.max_slots,
        max_waiting=config.max_waiting,
        max_model_len=max_model_len,
        max_receiving_share=max_receiving_share,
        vocab_size=vocab_size,
    )


class Engine:
    """Implements `engine.interface.EngineApi`.

    Args:
        executor: not shared; `close` closes it.
        settings: see `settings_for`.
        fingerprint: the model's, as in every block hash: `bytes.fromhex` of its hex form.
        max_inflight: steps submitted and not yet applied, at least 1.
        drafter: proposes speculative tokens; none by default.
    """

    def __init__(
        self,
        executor: Executor,
        settings: SchedulerSettings,
        *,
        fingerprint: bytes,
        max_inflight: int = 1,
        drafter: Drafter | None = None,
    ) -> None:
        self._executor = executor
        self._scheduler = Scheduler(settings, fingerprint=fingerprint, drafter=drafter)
        self._max_inflight = max_inflight
        self._in_flight: deque[tuple[Handle, StepPlan]] = deque()
        self._speeds = StepSpeeds()
        # After a step that could change nothing, only a call can.
        self._may_progress = False
        self._is_checked = True

    @property
    def scheduler(self) -> Scheduler:
        """Who decides, for simulations and tests that check what the decisions keep to."""
        return self._scheduler

    def add(self, request: EngineRequest, mode: Mode, *, handoff: HandoffId | None = None) -> None:
        """See `EngineApi.add`."""
        self._note_change()
        self._scheduler.add(request, mode, handoff=handoff)

    def kv_arrived(
        self,
        handoff: HandoffId,
        first_tokens: Sequence[int],
        *,
        num_received: int,
        num_peer_cached: int = 0,
    ) -> None:
        """See `EngineApi.kv_arrived`."""
        self._note_change()
        self._scheduler.kv_arrived(
            handoff, first_tokens, num_received=num_received, num_peer_cached=num_peer_cached
        )

    def retry(self, handoff: HandoffId, successor: HandoffId, request: EngineRequest) -> None:
        """See `EngineApi.retry`."""
        self._note_change()
        self._scheduler.retry(handoff, successor, request)

    def compute_locally(self, handoff: HandoffId, request: EngineRequest) -> None:
        """See `EngineApi.compute_locally`."""
        self._note_change()
        self._scheduler.compute_locally(handoff, request)

    def end_reservation(
        self, handoff: HandoffId, *, quarantine: bool, answered: bool = False
    ) -> None:
        """See `EngineApi.end_reservation`."""
        self._note_change()
        self._scheduler.end_reservation(handoff, quarantine=quarantine, answered=answered)

    def end_quarantine(self, handoff: HandoffId) -> int:
        """See `EngineApi.end_quarantine`."""
        self._note_change()
        return self._scheduler.end_quarantine(handoff)

    def release(self, request_id: RequestId) -> None:
        """See `EngineApi.release`."""
        self._note_change()
        self._scheduler.release(request_id)

    def abort(self, request_id: RequestId, sample_index: int | None = None) -> None:
        """See `EngineApi.abort`."""
        self._note_change()
        self._scheduler.abort(request_id, sample_index)

    def step(self, tell: Callable[[list[Event]], object] | None = None) -> list[Event]:
        """See `EngineApi.step`; what is told and what is returned are in order."""
        plan = None
        self._is_checked = False
        if len(self._in_flight) < self._max_inflight:
            plan = self._submit(tell)
        is_full = len(self._in_flight) >= self._max_inflight
        if self._in_flight and (is_full or plan is None):
            self._collect()
            self._may_progress = True
        elif plan is None:
            self._may_progress = False
        return self._scheduler.drain_events()

    def has_work(self) -> bool:
        """Whether `step` would do anything: a step is in flight, or something changed since the
        last one that could not go on."""
        return bool(self._in_flight) or self._may_progress

    def settle(self) -> None:
        """See `EngineApi.settle`."""
        while self._in_flight:
            self._collect()
            self._note_change()

    def stats(self) -> EngineStats:
        """Return the gauges and counters."""
        return msgspec.structs.replace(
            self._scheduler.stats(),
            prefill_tokens_per_s=self._speeds.prefill_tokens_per_s,
            decode_step_s=self._speeds.decode_step_s,
        )

    def needs_check(self) -> bool:
        """Whether a step or a call changed anything since `check_invariants`; `stats` does not."""
        return not self._is_checked

    def check_invariants(self) -> None:
        """Assert the accounting's invariants; takes time in proportion to the pool."""
        self._scheduler.check_invariants()
        self._is_checked = True

    def close(self) -> None:
        """Wait for steps in flight, then free the executor."""
        while self._in_flight:
            self._collect()
        self._executor.close()

    def _note_change(self) -> None:
        self._may_progress = True
        self._is_checked = False

    def _submit(self, tell: Callable[[list[Event]], object] | None) -> StepPlan | None:
        plan = self._scheduler.schedule()
        if plan is not None:
            events = self._scheduler.drain_events() if tell else []
            if tell and events:
                tell(events)
            handle = self._executor.submit(plan)
            self._executor.sample(handle)
            self._in_flight.append((handle, plan))
        return plan

    def _collect(self) -> None:
        handle, plan = self._in_flight.popleft()
        result = self._executor.collect(handle)
        self._speeds.measured(plan, result.seconds)
        self._scheduler.apply(result)
