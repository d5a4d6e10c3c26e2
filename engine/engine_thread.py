"""The thread that owns an engine: calls run on it between steps, events go to the event loop.

    loop:    call(fn) --> inbox             on_events(events), futures resolve
    thread:         wait while idle -> run the inbox -> step -> tell the loop --'

It sleeps on a condition while there is nothing to do. Once it has been idle for a while, it checks
the engine's invariants; it does so again only after something has changed, so an idle worker whose
gauges are read twice a second does nothing else. Everything reaches the loop in the order in which
it happened: the events of a step before the results of calls that ran after it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from core.clock import Clock, SystemClock
from core.errors import DovetailError
from engine.engine import Engine
from engine.events import Event
from engine.interface import EngineApi

T = TypeVar("T")
_Answer = Callable[[], None]


class EngineStopped(DovetailError):  # noqa: N818 - reads as a state
    """The engine's thread has stopped or failed; the call did not run."""


class _Job(Generic[T]):
    """A function to run between steps, and the future that its outcome resolves, if any."""

    def __init__(self, fn: Callable[[EngineApi], T], future: asyncio.Future[T] | None) -> None:
        self._fn = fn
        self._future = future

    def run(self, engine: EngineApi) -> _Answer | None:
        """Run on the engine's thread; returns what to do on the loop."""
        if self._future is None:
            self._fn(engine)
            return None
        try:
            result = self._fn(engine)
        except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
            return partial(self._fail, self._future, error)
        return partial(self._resolve, self._future, result)

    def refuse(self) -> None:
        """On the loop: the engine is gone, and with it what a function without future would have
        changed."""
        if self._future is not None:
            self._fail(self._future, EngineStopped("the engine has stopped"))

    @staticmethod
    def _resolve(future: asyncio.Future[T], result: T) -> None:
        if not future.done():
            future.set_result(result)

    @staticmethod
    def _fail(future: asyncio.Future[T], error: Exception) -> None:
        if not future.done():
            future.set_exception(error)


class EngineThread:
    """Runs one engine.

    Args:
        engine: from `start` on, only this thread touches it; it is closed when the thread ends.
        loop: where everything is told.
        on_events: called on the loop with the events of a step, when there are any.
        on_failure: called on the loop, once, with what a step or a posted function raised; the
            engine is not run any further. None: the loop's exception handler.
        idle_check_s: seconds without a step before the engine's invariants are checked, once for
            all that changed; calls that only read do not count.
        clock: measures these seconds; the machine's by default.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        loop: asyncio.AbstractEventLoop,
        on_events: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None] | None = None,
        idle_check_s: float = 0.5,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._on_events = on_events
        self._on_failure = on_failure or self._raise_on_loop
        self._idle_check_s = idle_check_s
        self._clock = clock or SystemClock()
        self._last_step_at = self._clock.now()
        self._changed = threading.Condition()
        self._inbox: deque[_Job[Any]] = deque()
        self._is_stopping = False
        self._is_over = False
        self._over = loop.create_future()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, fn: Callable[[EngineApi], T]) -> asyncio.Future[T]:
        """Run `fn` between steps; the future gets its result or its exception.

        The future raises EngineStopped if the thread ends first. Cancelling it does not undo the
        call.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._put(_Job(fn, future))
        return future

    def post(self, fn: Callable[[EngineApi], object]) -> None:
        """Run `fn` between steps; what it raises is a failure of the engine."""
        self._put(_Job(fn, None))

    async def stop(self) -> None:
        """Run what was called before, finish the steps in flight, close the engine, end."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            await asyncio.shield(self._over)
            self._thread.join()

    def _put(self, job: _Job[Any]) -> None:
        with self._changed:
            if not self._is_over:
                self._inbox.append(job)
                self._changed.notify()
                return
        job.refuse()

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - whatever ends the engine is reported
            failure = error
        with self._changed:
            self._is_over = True
            left = list(self._inbox)
            self._inbox.clear()
        self._tell(self._finish, left, failure)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                for _ in range(len(self._inbox)):  # what a failure leaves there is refused
                    answer = self._inbox.popleft().run(self._engine)
                    if answer is not None:
                        self._tell(answer)
                if self._engine.has_work():
                    events = self._engine.step(self._tell_events)
                    self._last_step_at = self._clock.now()
                    if events:
                        self._tell_events(events)
        finally:
            self._engine.close()

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do; returns False when it is time to end."""
        with self._changed:
            self._changed.wait_for(self._is_busy, timeout=self._until_check_s())
        if not self._is_busy():
            self._engine.check_invariants()
            with self._changed:
                self._changed.wait_for(self._is_busy)
        return not self._is_stopping or bool(self._inbox)

    def _until_check_s(self) -> float | None:
        """Return the seconds until the invariants are to be checked if it stays idle; None: they
        were checked since the last change."""
        if not self._engine.needs_check():
            return None
        return max(0.0, self._last_step_at + self._idle_check_s - self._clock.now())

    def _is_busy(self) -> bool:
        return bool(self._inbox) or self._is_stopping or self._engine.has_work()

    def _tell_events(self, events: list[Event]) -> None:
        self._tell(self._on_events, events)

    def _tell(self, fn: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(fn, *args)

    def _finish(self, left: list[_Job[Any]], failure: BaseException | None) -> None:
        for job in left:
            job.refuse()
        self._over.set_result(None)
        if failure is not None:
            self._on_failure(failure)

    def _raise_on_loop(self, error: BaseException) -> None:
        message = f"{self._thread.name}: the engine failed"
        context = {"message": message, "exception": error}
        self._loop.call_exception_handler(context)
