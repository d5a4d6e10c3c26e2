"""An etcd lease that keeps itself alive, and says locally until when it is certain to be ours.

Fencing reads `is_valid`: measured from when a keepalive was *sent*, since etcd may have renewed the
lease at any moment after that, and an answer says nothing about the time since. A client that goes
by the answers it got believes in its lease for seconds after etcd gave it away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from control_plane import background
from control_plane.background import OnFailure
from control_plane.etcd.client import EtcdClient
from core.back_off import BackOff
from core.clock import Clock
from core.errors import ControlPlaneError
from core.shared_ticks import last_multiple, sleep_s

_TICK_S = 1.0
"""Keepalives fall together with heartbeats: they leave up to so much earlier than a third of the
time to live, where that is well above it."""


class Lease:
    """Made by `grant`; ends by `revoke`, or when etcd does not know it any more."""

    def __init__(
        self,
        client: EtcdClient,
        lease_id: int,
        ttl_s: float,
        *,
        sent_at: float,
        clock: Clock,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self._is_lost = False
        self._on_lost: Callable[[], None] | None = None
        self._client = client
        self._clock = clock
        self._valid_until = sent_at + ttl_s
        self._keeping = background.start(
            self._keep(), name=f"lease {lease_id}", on_failure=on_failure
        )

    @classmethod
    async def grant(
        cls,
        client: EtcdClient,
        ttl_s: float,
        *,
        clock: Clock,
        on_failure: OnFailure | None = None,
    ) -> Lease:
        """Get a lease and begin to keep it alive.

        Args:
            on_failure: told if that ends by anything but the lease's loss, such as a failing
                callback.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        sent_at = clock.now()
        lease_id, granted_s = await client.grant_lease(ttl_s)
        return cls(client, lease_id, granted_s, sent_at=sent_at, clock=clock, on_failure=on_failure)

    @property
    def is_lost(self) -> bool:
        """Whether etcd said that it does not know this lease any more."""
        return self._is_lost

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once when etcd says that the lease is gone."""
        self._on_lost = callback

    def is_valid(self, now: float) -> bool:
        """Whether no one else can have been told by etcd that this lease is gone."""
        return not self._is_lost and now < self._valid_until

    async def revoke(self) -> None:
        """Give the lease and its keys back; when etcd does not answer, they go after the TTL."""
        self.abandon()
        with contextlib.suppress(ControlPlaneError):
            await self._client.revoke_lease(self.id)

    def abandon(self) -> None:
        """Keep it alive no longer."""
        self._keeping.cancel()

    async def _keep(self) -> None:
        back_off = BackOff(first_s=0.1, limit_s=self.ttl_s / 3)
        while True:
            sent_at = self._clock.now()
            try:
                ttl_s = await self._client.keep_alive(self.id)
            except ControlPlaneError:  # etcd may have it still, and go on counting when it is back
                await asyncio.sleep(back_off.next_s(self._client.rng))
                continue
            if ttl_s == 0:
                self._is_lost = True
                if self._on_lost is not None:
                    self._on_lost()
                return
            back_off.reset()
            self._valid_until = sent_at + ttl_s
            await asyncio.sleep(sleep_s(_renewal_at(sent_at, ttl_s), self._clock.now()))


def _renewal_at(sent_at: float, ttl_s: float) -> float:
    """From when it was sent: an etcd that takes long to answer is asked no less often."""
    third_s = ttl_s / 3
    latest = sent_at + third_s
    return last_multiple(_TICK_S, latest) if third_s > 2 * _TICK_S else latest
