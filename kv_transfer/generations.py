"""Which generation of each peer's region is the newest known: descriptors of an older are refused.

A backend cannot tell by itself: it knows every address that a peer ever registered.
"""

from __future__ import annotations

from kv_transfer.transport import PeerName, RemoteRegion


class Generations:
    """By peer, as far as writes and reads have named them."""

    def __init__(self) -> None:
        self._newest: dict[PeerName, int] = {}

    def refusal(self, remote: RemoteRegion) -> str:
        """Learn a region's generation; return why it is refused, empty if it is not."""
        newest = self._newest.setdefault(remote.peer, remote.generation)
        if remote.generation < newest:
            return f"stale region generation {remote.generation}, {newest} is known"
        self._newest[remote.peer] = remote.generation
        return ""

    def forget(self, peer: PeerName) -> None:
        """The peer was removed: what comes next under its name is another life."""
        self._newest.pop(peer, None)
