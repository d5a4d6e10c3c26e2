"""An event loop in virtual time: one heap, no selector, no waiting.

Every callback, message, timer, write, freeze and death is an event on the heap, and time jumps from
one to the next. An event whose context belongs to a process that stands still is parked until the
process goes on; that of a dead one for ever.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from collections.abc import Callable
from contextvars import Context, copy_context
from heapq import heappop, heappush
from typing import Any

from planner.protocol.process import CURRENT, Lane, Process, State

_TEAR_DOWN_S = 10.0
"""Virtual seconds that cancelled tasks get for their clean-up, before they are cancelled again."""

_TEAR_DOWN_MAX_S = 200.0

OnError = Callable[[dict[str, Any]], None]


class Entry(TimerHandle):
    """An event on the heap."""

    __slots__ = ("lane", "process")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context,
        lane: Lane,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.lane = lane
        self.process: Process | None = context.get(CURRENT)

    def fire(self) -> None:
        """Run the callback in its context; what it raises goes to the loop's handler."""
        self._run()


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs events in the order of (time, order of scheduling).

    Args:
        on_error: told what a callback raised, and of tasks and futures that failed unheard.
    """

    def __init__(self, on_error: OnError) -> None:
        super().__init__()
        self._now = 0.0
        self._until = 0.0
        self._is_halted = False
        self._is_ending = False
        self._heap: list[tuple[float, int, Entry]] = []
        self._num_scheduled = 0
        self.num_events = 0
        self.set_exception_handler(lambda _, context: on_error(context))

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Entry:
        """Run at the present time, after what was scheduled for it before."""
        return self._schedule(self._now, callback, args, context, Lane.LOOP)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Entry:
        """Run as `call_soon` does: there is one thread."""
        return self._schedule(self._now, callback, args, context, Lane.LOOP)

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Entry:
        """Run after `delay` virtual seconds."""
        return self._schedule(self._now + delay, callback, args, context, Lane.LOOP)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Entry:
        """Run at a virtual second."""
        return self._schedule(when, callback, args, context, Lane.LOOP)

    def call_in(
        self, process: Process, lane: Lane, when: float, callback: Callable[..., object], *args: Any
    ) -> Entry:
        """Run in a process at a virtual second, not before now."""
        return self._schedule(max(when, self._now), callback, args, process.context, lane)

    def call_world(self, when: float, callback: Callable[..., object], *args: Any) -> Entry:
        """Run at a virtual second outside of all processes."""
        return self._schedule(max(when, self._now), callback, args, Context(), Lane.LOOP)

    # --- processes ------------------------------------------------------------------------------

    def freeze(self, process: Process) -> None:
        """Stop a process: its events wait."""
        process.state = State.FROZEN
        process.stopped_at = self._now

    def thaw(self, process: Process, offsets: dict[Lane, float]) -> None:
        """Let a process go on: what waited happens after its lane's offset, in its order."""
        process.state = State.RUNNING
        process.resumed_at = self._now
        self._unpark(process, offsets)

    def kill(self, process: Process) -> None:
        """End a process: nothing of it happens any more."""
        process.state = State.DEAD
        process.stopped_at = self._now

    def _unpark(self, process: Process, offsets: dict[Lane, float]) -> None:
        parked, process.parked = process.parked, []
        for entry in parked:
            assert isinstance(entry, Entry)
            self._push(self._now + offsets.get(entry.lane, 0.0), entry)

    # --- running --------------------------------------------------------------------------------

    def run_until(self, when: float) -> None:
        """Let everything happen that is due until `when`, unless `halt` is called."""
        self._until = when
        if not self._is_halted:
            self.run_forever()
        if not self._is_halted:
            self._now = max(self._now, when)

    def halt(self) -> None:
        """Stop after the present event, for good."""
        self._is_halted = True

    def tear_down(self, processes: list[Process]) -> None:
        """Cancel all tasks, of dead processes too, and let them end; no message arrives any more.
        Tasks that were merely forgotten would run their clean-up at some later time.

        Raises:
            RuntimeError: a task goes on whatever happens; names it.
        """
        self._is_halted = False
        self._is_ending = True
        for process in processes:
            self.thaw(process, {})
        seen: set[asyncio.Task[Any]] = set()
        deadline = self._now + _TEAR_DOWN_MAX_S
        while pending := asyncio.all_tasks(self):
            if self._now >= deadline:
                msg = f"tasks do not end when they are cancelled: {sorted(map(str, pending))}"
                raise RuntimeError(msg)
            seen |= pending
            for task in pending:
                task.cancel()
            self._until = self._now + _TEAR_DOWN_S
            self.run_forever()
            self._now = self._until
        for task in seen:
            if not task.cancelled():
                task.exception()  # seen, so that nobody logs it
        self._heap.clear()
        self.close()

    def _run_once(self) -> None:
        heap = self._heap
        while heap and heap[0][0] <= self._until and not self._is_halted:
            when, _, entry = heappop(heap)
            process = entry.process
            if entry.cancelled() or (self._is_ending and not _is_of_a_task(entry)):
                continue
            if process is not None and not process.is_running:
                process.parked.append(entry)
                continue
            self._now = max(self._now, when)
            self.num_events += 1
            entry.fire()
        self.stop()

    def _schedule(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
        lane: Lane,
    ) -> Entry:
        entry = Entry(
            when, callback, args, self, copy_context() if context is None else context, lane
        )
        self._push(when, entry)
        return entry

    def _push(self, when: float, entry: Entry) -> None:
        self._num_scheduled += 1
        heappush(self._heap, (when, self._num_scheduled, entry))


def _is_of_a_task(entry: Entry) -> bool:
    """Whether it may be a step of a task, rather than something that the world does."""
    return entry.process is not None and entry.lane is Lane.LOOP
