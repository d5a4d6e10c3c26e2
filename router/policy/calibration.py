"""How far predictions are from what happened, learned as one factor a path.

The factor multiplies later predictions: exp of a moving average of log(actual / predicted), so that
twice too slow and twice too fast weigh the same; bounded, so that an outage teaches nothing absurd.
"""

from __future__ import annotations

import math

_WEIGHT = 0.1
_MAX_LOG = math.log(4.0)


class Factor:
    """Moving ratio of actual over predicted.

    Attributes:
        value: from 1/4 to 4; 1 until something was observed.
    """

    __slots__ = ("_log", "value")

    def __init__(self) -> None:
        self._log = 0.0
        self.value = 1.0

    def observe(self, predicted: float, actual: float) -> None:
        """Learn from one uncalibrated prediction; what is not positive teaches nothing."""
        if predicted <= 0 or actual <= 0:
            return
        error = max(-_MAX_LOG, min(_MAX_LOG, math.log(actual / predicted)))
        self._log += _WEIGHT * (error - self._log)
        self.value = math.exp(self._log)


class Calibration:
    """Factors for the TTFT of handoffs, the TTFT of prompts computed in place, and TPOT."""

    __slots__ = ("alone_ttft", "handoff_ttft", "tpot")

    def __init__(self) -> None:
        self.handoff_ttft = Factor()
        self.alone_ttft = Factor()
        self.tpot = Factor()

    def ttft(self, *, is_handoff: bool) -> Factor:
        """Return the factor of one kind of path."""
        return self.handoff_ttft if is_handoff else self.alone_ttft
