"""An engine as the pools see it: `engine.engine_thread` runs one on a thread of its own, a
simulation on its one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from engine.interface import EngineApi

T = TypeVar("T")


class EngineDriver(Protocol):
    """Carries calls to an engine, between its steps, and what happens there to the event loop, in
    the order in which it happened; see `EngineThread` for what the methods promise."""

    def call(self, fn: Callable[[EngineApi], T]) -> asyncio.Future[T]:
        """Run `fn` between steps; the future gets its result or its exception."""
        ...

    def post(self, fn: Callable[[EngineApi], object]) -> None:
        """Run `fn` between steps; what it raises is a failure of the engine."""
        ...
