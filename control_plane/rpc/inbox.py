"""What streams and threads tell the owner of their messages, handled by one task, in order.

Callbacks on the loop must be quick and may not fail. They put what came into an inbox; the owner's
task takes all of it at a time, so that one answer per wake-up can cover a whole engine step, and an
exception ends that task (and with its task group the process) instead of being lost in a callback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

OwnerT = TypeVar("OwnerT")


class Inbox(Generic[OwnerT]):
    """Callbacks that the owner runs one after another. Used on the loop's thread alone."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[OwnerT], None]] = []
        self._arrived = asyncio.Event()

    def put(self, callback: Callable[[OwnerT], None]) -> None:
        """Have the owner's task call `callback(owner)`."""
        self._callbacks.append(callback)
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Have the owner's task raise `error`."""
        self.put(lambda _: _raise(error))

    async def take(self) -> list[Callable[[OwnerT], None]]:
        """Wait until there is something, and take all of it, in the order put."""
        await self._arrived.wait()
        self._arrived.clear()
        callbacks, self._callbacks = self._callbacks, []
        return callbacks


def _raise(error: BaseException) -> NoReturn:
    raise error
