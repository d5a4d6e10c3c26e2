"""One log line when etcd stops answering, or taking writes, and one when it does again, however
many calls fail between."""

from __future__ import annotations

import logging

from core.clock import Clock

_log = logging.getLogger(__name__)


class OutageLog:
    """One client's.

    Args:
        endpoints: as the user wrote them.
    """

    def __init__(self, endpoints: str, clock: Clock) -> None:
        self._endpoints = endpoints
        self._clock = clock
        self._down_since: float | None = None
        self._full_since: float | None = None
        self._was_reached = False

    @property
    def was_reached(self) -> bool:
        """Whether etcd ever answered."""
        return self._was_reached

    def failed(self, message: str) -> None:
        """No member answers."""
        if self._down_since is None:
            self._down_since = self._clock.now()
            _log.warning("%s; %s", message, self._outlook())

    def full(self, message: str) -> None:
        """It answers, but takes no writes."""
        self._answered()
        if self._full_since is None:
            self._full_since = self._clock.now()
            _log.warning("%s; serving goes on; compact, defragment and disarm its alarm", message)

    def answered(self, *, wrote: bool) -> None:
        """It answers; `wrote`: and took a write."""
        self._answered()
        if wrote and self._full_since is not None:
            _log.info("etcd takes writes again after %.1f s", self._clock.now() - self._full_since)
            self._full_since = None

    def _answered(self) -> None:
        if self._down_since is not None:
            again = "again " if self._was_reached else ""
            _log.info("etcd answers %safter %.1f s", again, self._clock.now() - self._down_since)
            self._down_since = None
        self._was_reached = True

    def _outlook(self) -> str:
        """Say what an outage means; a process that never reached etcd serves nobody yet."""
        if self._was_reached:
            return "serving goes on without it"
        return f"waiting for etcd at {self._endpoints}"
