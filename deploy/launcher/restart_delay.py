"""How long to wait before a component that died is started again. Pure."""

from __future__ import annotations

from core.back_off import BackOff, Dice

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
FORGIVEN_AFTER_S = 60.0


class RestartDelay:
    """Grows with each death in a row; a life long enough starts over."""

    def __init__(self, rng: Dice) -> None:
        self._rng = rng
        self._back_off = BackOff(first_s=FIRST_DELAY_S, limit_s=LONGEST_DELAY_S)

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait after a life of `lived_s` seconds."""
        if lived_s >= FORGIVEN_AFTER_S:
            self._back_off.reset()
        return self._back_off.next_s(self._rng)
