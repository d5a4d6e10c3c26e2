"""Whether KV moves between this worker and its peers, by the last transfer with each. Pure.

    no peer known -> ready        one path works -> ready
    every path fails -> not ready, and routers pair it with nobody for a while (1 s, doubling to 30)
                        -> they may try it again: only a transfer can show that a path works

A peer whose process is gone is forgotten: its death says nothing about this worker.
"""

from __future__ import annotations

from msgspec.structs import replace

from core.ids import Boot
from core.messages import WorkerLoad

FIRST_S = 1.0
LIMIT_S = 30.0


class Paths:
    """By boots of peers."""

    def __init__(self) -> None:
        self._reason_by_peer: dict[Boot, str] = {}
        self._avoided_s = FIRST_S
        self._avoided_until = 0.0

    @property
    def failure(self) -> str:
        """Why the path to every known peer fails; empty where one works, or none is known."""
        reasons = list(self._reason_by_peer.values())
        if not reasons or not all(reasons):
            return ""
        return f"no KV moves to or from any of {len(reasons)} peers: {reasons[-1]}"

    def is_avoided(self, now: float) -> bool:
        """Whether routers should pair this worker with nobody at monotonic second `now`."""
        return now < self._avoided_until and bool(self.failure)

    def worked(self, peer: Boot) -> None:
        """A transfer with a peer ended well."""
        self._reason_by_peer[peer] = ""
        self._avoided_s = FIRST_S

    def failed(self, peer: Boot, reason: str, now: float) -> None:
        """A transfer with a peer failed; `reason` is not empty."""
        self._reason_by_peer.pop(peer, None)
        self._reason_by_peer[peer] = reason  # the last
        if self.failure and now >= self._avoided_until:
            self._avoided_until = now + self._avoided_s
            self._avoided_s = min(2.0 * self._avoided_s, LIMIT_S)

    def forget(self, peer: Boot) -> None:
        """A peer's process is gone, or has no connection here."""
        self._reason_by_peer.pop(peer, None)


def with_paths(load: WorkerLoad, paths: Paths, now: float) -> WorkerLoad:
    """Return the load with what routers must know of the paths."""
    failure = paths.failure
    if not failure:
        return load
    return replace(load, path_failure=failure, is_unpaired=paths.is_avoided(now))
