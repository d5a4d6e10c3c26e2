"""When each of many things is due next: a heap whose outdated entries are dropped when met."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")


class Timers(Generic[KeyT]):
    """At most one due time a key; setting it again replaces it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, KeyT]] = []
        self._due_by_key: dict[KeyT, float] = {}
        self._serial = 0

    def set(self, key: KeyT, due: float) -> bool:
        """Set when a key is due; return whether that is now the earliest of all."""
        if self._due_by_key.get(key) == due:
            return False
        self._due_by_key[key] = due
        self._serial += 1  # keys need not be comparable
        heapq.heappush(self._heap, (due, self._serial, key))
        self._compact()
        return self._heap[0][2] == key

    def discard(self, key: KeyT) -> None:
        """Forget a key."""
        self._due_by_key.pop(key, None)

    @property
    def num_entries(self) -> int:
        """Entries of the heap, outdated ones included: in proportion to the keys."""
        return len(self._heap)

    def next_due(self) -> float | None:
        """Return the earliest due time, None without any."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due_by_key.get(key) == due:
                return due
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> list[KeyT]:
        """Remove and return the keys that are due."""
        keys: list[KeyT] = []
        while (due := self.next_due()) is not None and due <= now:
            key = heapq.heappop(self._heap)[2]
            del self._due_by_key[key]
            keys.append(key)
        return keys

    def _compact(self) -> None:
        """Rebuild once outdated entries are most of the heap, so that it stays in proportion."""
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._due_by_key):
            live = (entry for entry in self._heap if self._due_by_key.get(entry[2]) == entry[0])
            self._heap = list(live)
            heapq.heapify(self._heap)
