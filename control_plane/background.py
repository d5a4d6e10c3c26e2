"""Tasks that work for as long as whoever made them. One that fails is told; none dies unheard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

OnFailure = Callable[[BaseException], None]
"""Called on the event loop, once, with what ended a task that was to run on."""


def start(
    work: Coroutine[Any, Any, None], *, name: str, on_failure: OnFailure | None
) -> asyncio.Task[None]:
    """Begin `work` on the running loop.

    Args:
        on_failure: None: the loop's exception handler, which logs.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(partial(_tell, on_failure=on_failure or _to_loop))
    return task


async def stop(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; what it failed with before has been told."""
    task.cancel()
    await asyncio.wait({task})


def _tell(task: asyncio.Task[None], *, on_failure: OnFailure) -> None:
    if not task.cancelled() and (error := task.exception()):
        error.add_note(f"in the task {task.get_name()!r}")
        on_failure(error)


def _to_loop(error: BaseException) -> None:
    context = {"message": "a task that was to run on failed", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)
