"""Whether a worker is ready, for probes.

    not registered yet -> ready <-> its fabric fails
                            '-> draining: not ready any more

What etcd does after the first registration changes nothing: serving goes on without it, and an
orchestrator that took all workers out of service with it would turn its outage into one of all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from core.errors import FabricError
from kv_transfer.transport import Health


class WorkerHealth:
    """Kept by the worker's process, asked by `/health/ready`.

    Args:
        fabric: asks the fabric for its health; raises FabricError when it has ended.
    """

    def __init__(self, fabric: Callable[[], Awaitable[Health]]) -> None:
        self._fabric = fabric
        self._was_registered = False
        self._is_draining = False

    def registered(self) -> None:
        """Routers can find the worker."""
        self._was_registered = True

    def draining(self) -> None:
        """It takes nothing new from now on."""
        self._is_draining = True

    async def is_ready(self) -> bool:
        """Return whether a request that came now would be served."""
        if not self._was_registered or self._is_draining:
            return False
        try:
            health = await self._fabric()
        except FabricError:
            return False
        return health.ok
