"""Whether a worker is ready, for probes.

    not registered yet -> ready <-> its fabric fails, or no KV moves to or from any peer
                            '-> draining: not ready, until it has another role, or has left

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
        path_failure: says why no path to a peer works, see `kv_transfer.paths`; empty where one
            does.
    """

    def __init__(
        self, fabric: Callable[[], Awaitable[Health]], path_failure: Callable[[], str]
    ) -> None:
        self._fabric = fabric
        self._path_failure = path_failure
        self._was_registered = False
        self._is_draining = False

    def registered(self) -> None:
        """Routers can find the worker."""
        self._was_registered = True

    def draining(self, *, is_draining: bool) -> None:
        """It takes nothing new from now on, or takes work again in another role."""
        self._is_draining = is_draining

    async def obstacle(self) -> str:
        """Return why a request that came now would not be served as it should, or nothing."""
        if self._is_draining:
            return "draining"
        if not self._was_registered:
            return "not registered in etcd yet"
        try:
            health = await self._fabric()
        except FabricError as error:
            return str(error)
        if not health.ok:
            return health.reason or "the fabric fails"
        return self._path_failure()
