"""What a watch of etcd has told, as one picture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from control_plane.etcd.values import Deleted, KeyValue, Listing


class Mirror:
    """Believes what a watch tells, and waits until that is what it should be."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.changed = asyncio.Event()
        self.num_listings = 0

    def on_listing(self, listing: Listing, *, replay_from: int) -> int:
        self.content = {item.key: item.value for item in listing.items}
        self.num_listings += 1
        self.changed.set()
        return listing.revision + 1

    def on_changes(self, changes: list[KeyValue | Deleted]) -> None:
        for change in changes:
            if isinstance(change, KeyValue):
                self.content[change.key] = change.value
            else:
                del self.content[change.key]
        self.changed.set()

    async def until(self, is_met: Callable[[], bool], within_s: float = 8.0) -> None:
        async with asyncio.timeout(within_s):
            while not is_met():
                self.changed.clear()
                await self.changed.wait()
