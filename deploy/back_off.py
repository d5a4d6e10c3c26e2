"""How long to wait before a component that died is started again. Pure."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
FORGIVEN_AFTER_S = 60.0


class BackOff:
    """Doubles the delay with each death; a life long enough starts over."""

    def __init__(self) -> None:
        self._next_s = FIRST_DELAY_S

    def delay(self, lived_s: float) -> float:
        """Return the seconds to wait after a life of `lived_s` seconds."""
        if lived_s >= FORGIVEN_AFTER_S:
            self._next_s = FIRST_DELAY_S
        delay, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_DELAY_S)
        return delay
