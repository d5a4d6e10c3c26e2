"""What a prefill worker remembers of attempts that it no longer works on.

A settle may overtake its ask (they may travel on different streams after a reconnect); the
tombstone refuses the ask when it comes. An attempt of which a write failed is remembered too, so
that no settle of it is ever answered: something of it may still land.
"""

from __future__ import annotations

from itertools import takewhile

from core.ids import HandoffId

KEEP_S = 900.0
"""How long a tombstone is kept; longer than any ask is under way."""


class Tombstones:
    """Attempts and when they were buried."""

    def __init__(self) -> None:
        self._placed_at: dict[HandoffId, float] = {}
        self._may_land: set[HandoffId] = set()

    def __contains__(self, handoff: HandoffId) -> bool:
        return handoff in self._placed_at

    def __len__(self) -> int:
        return len(self._placed_at)

    def may_land(self, handoff: HandoffId) -> bool:
        """Return whether a settle of this attempt must stay without an answer."""
        return handoff in self._may_land

    def place(self, handoff: HandoffId, now: float, *, may_land: bool) -> None:
        """Bury an attempt; the first tombstone of one stays."""
        if handoff in self._placed_at:
            return
        self._placed_at[handoff] = now
        if may_land:
            self._may_land.add(handoff)

    def expire(self, now: float) -> None:
        """Remove those that are older than `KEEP_S`."""
        is_old = takewhile(lambda stone: stone[1] + KEEP_S <= now, self._placed_at.items())
        for handoff, _ in list(is_old):
            del self._placed_at[handoff]
            self._may_land.discard(handoff)
