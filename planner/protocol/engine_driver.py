"""An engine on the simulation's loop: an `engine.engine_driver.EngineDriver`, as `EngineThread`.

    post, call --> inbox --> round: run the inbox, step --> (the step's time) --> next round
                                        '--> events and answers, in order, a little later

A step touches the pool at once and takes its modelled time afterwards. With two steps in flight,
time passes between the scheduling of a step and its arithmetic, too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from engine.engine import Engine
from engine.events import Event
from engine.interface import EngineApi
from kv_transfer.inprocess.model import Dice
from planner.protocol.process import Lane, Process
from planner.protocol.virtual_loop import VirtualLoop

T = TypeVar("T")

_HANDOVER_S = 0.002
"""The longest that something takes from one thread of a process to another."""


class StepTime:
    """What the modelled device slept in the present round; a `MockDevice`'s `sleep`."""

    def __init__(self) -> None:
        self._slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Take time, later."""
        self._slept_s += seconds

    def take(self) -> float:
        """Return what was slept since the last call."""
        slept_s, self._slept_s = self._slept_s, 0.0
        return slept_s


class SimEngine:
    """Runs one engine in one process.

    Args:
        on_events: as `EngineThread`'s; so is `on_failure`.
        before_step: called before every step.
        after_round: called when jobs or a step changed the engine.
    """

    def __init__(  # noqa: PLR0913 - keyword-only wiring, called once
        self,
        engine: Engine,
        process: Process,
        *,
        loop: VirtualLoop,
        dice: Dice,
        step_time: StepTime,
        on_events: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None],
        before_step: Callable[[], None],
        after_round: Callable[[], None],
    ) -> None:
        self.engine = engine
        self._process = process
        self._loop = loop
        self._dice = dice
        self._step_time = step_time
        self._on_events = on_events
        self._on_failure = on_failure
        self._before_step = before_step
        self._after_round = after_round
        self._jobs: deque[Callable[[], None]] = deque()
        self._replies: deque[Callable[[], None]] = deque()
        self._last_reply_at = 0.0
        self._busy_until = 0.0
        self._is_awake = False
        self._has_failed = False

    @property
    def has_jobs(self) -> bool:
        """Whether the engine has not heard all yet."""
        return bool(self._jobs)

    def call(self, fn: Callable[[EngineApi], T]) -> asyncio.Future[T]:
        """Run `fn` between steps; the future gets its result or its exception."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                result = fn(self.engine)
            except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
                failure = error
                self._reply(lambda: _fail(future, failure))
            else:
                self._reply(lambda: _resolve(future, result))

        self._put(job)
        return future

    def post(self, fn: Callable[[EngineApi], object]) -> None:
        """Run `fn` between steps; what it raises is a failure of the engine."""
        self._put(lambda: _discard(fn(self.engine)))

    def _put(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._wake()

    def _wake(self) -> None:
        if not self._is_awake and not self._has_failed:
            self._is_awake = True
            at = max(self._busy_until, self._loop.time() + self._dice.uniform(0.0, _HANDOVER_S))
            self._loop.call_in(self._process, Lane.ENGINE, at, self._round)

    def _round(self) -> None:
        self._is_awake = False
        try:
            for _ in range(len(self._jobs)):
                self._jobs.popleft()()
            if self.engine.has_work():
                self._step()
            self._after_round()
        except Exception as error:  # noqa: BLE001 - whatever ends the engine is reported
            failure = error
            self._has_failed = True
            self._reply(lambda: self._on_failure(failure))
            return
        if self._jobs or self.engine.has_work():
            self._wake()

    def _step(self) -> None:
        self._before_step()
        events = self.engine.step(self._tell)
        slept_s = self._step_time.take()
        self._busy_until = self._loop.time() + slept_s * self._dice.uniform(0.5, 2.0)
        if events:
            self._tell(events)

    def _tell(self, events: list[Event]) -> None:
        self._reply(lambda: self._on_events(events))

    def _reply(self, reply: Callable[[], None]) -> None:
        """Have something happen on the process's loop, after all replies before it."""
        at = max(self._busy_until, self._loop.time() + self._dice.uniform(0.0, _HANDOVER_S))
        self._last_reply_at = max(self._last_reply_at, at)
        self._replies.append(reply)
        self._loop.call_in(self._process, Lane.LOOP, self._last_reply_at, self._reply_next)

    def _reply_next(self) -> None:
        self._replies.popleft()()


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _discard(_: object) -> None:
    """What a posted function returns is for nobody."""
