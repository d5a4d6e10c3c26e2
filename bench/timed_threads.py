"""One piece of work on several threads at once, timed by themselves.

The thread that waits for them has no core of its own, so its clock says nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from core.clock import SystemClock


class TimedThreads:
    """A pool whose threads start together.

    Args:
        threads: how many.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._clock = SystemClock()

    def seconds(self, work: Callable[[int], None]) -> float:
        """Run `work(thread)` on each; return the time from the first start to the last end."""
        ready = threading.Barrier(self.threads)

        def run(thread: int) -> tuple[float, float]:
            ready.wait()
            started = self._clock.now()
            work(thread)
            return started, self._clock.now()

        spans = [one.result() for one in [self._pool.submit(run, t) for t in range(self.threads)]]
        return max(end for _, end in spans) - min(start for start, _ in spans)
