"""When a process ends: at the first SIGTERM, SIGINT or SIGUSR1, or once one of its parts fails.

SIGINT and SIGUSR1 (the launcher's) ask it to hurry, too, also where it is ending already.

A process that lost a part but lives on is the worst of its failures: its entry and its port say
that it serves. One that ends with what went wrong is started again, and its peers go on without it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)


class ProcessEnd:
    """The end of this process, awaited by one and brought about by many. Make it on the running
    loop, once.

    Attributes:
        is_hurried: whether it should not wait for what takes long.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = loop.create_future()
        self.is_hurried = False
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        for number in (signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, self.hurry)

    def stop(self) -> None:
        """End it in order; not an error."""
        if not self._end.done():
            self._end.set_result(None)

    def hurry(self) -> None:
        """End it in order, and soon: nobody is there to go on with what it does."""
        self.is_hurried = True
        self.stop()

    def fail(self, error: BaseException) -> None:
        """End it with `error`: an `on_failure` for whatever runs in the background."""
        if self._end.done():
            _log.error("failed while the process ended", exc_info=error)
        else:
            self._end.set_exception(error)

    def must_run(self, task: asyncio.Task[Any]) -> None:
        """End it with whatever ends `task`; the end of the process may end the task."""
        task.add_done_callback(self._ended)

    async def wait(self) -> None:
        """Return when it was asked to stop.

        Raises:
            BaseException: what a part failed with.
        """
        await asyncio.shield(self._end)

    async def comes_after(self, wanted: Coroutine[Any, Any, None]) -> bool:
        """Return whether `wanted` returned before the end; it is cancelled else."""
        waiting = asyncio.create_task(wanted)
        await asyncio.wait({waiting, self._end}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return not self._end.done()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)
        elif not self._end.done():
            msg = f"{task.get_name()} ended by itself"
            self.fail(RuntimeError(msg))
            # For `wait`. Where nobody waits, the process could not start: its own error ends it,
            # and its parts too.
            self._end.exception()
