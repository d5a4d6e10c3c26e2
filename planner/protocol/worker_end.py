"""How a worker's process ends in order, and who is told that it will."""

from __future__ import annotations

import asyncio


class WorkerEnd:
    """`control_plane.roles.duty.End` and `Readiness`: nobody probes, and nobody hurries.

    Attributes:
        leave_by: of the process's clock, in order: what is left then may be lost.
    """

    is_hurried = False

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self.leave_by = 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether it leaves."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """End it in order."""
        self._stopped.set()

    async def wait(self) -> None:
        """Return when it was asked to stop."""
        await self._stopped.wait()

    def draining(self, *, is_draining: bool) -> None:
        """Probes would hear of it."""
