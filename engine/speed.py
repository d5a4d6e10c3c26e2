"""How fast the device is, smoothed, for the router's cost model."""

from __future__ import annotations

from engine.executor.interface import StepPlan


class StepSpeeds:
    """Exponentially smoothed speeds of prompts and of decoding steps.

    Attributes:
        prefill_tokens_per_s: of steps with at least `min_prompt_tokens` prompt tokens.
        decode_step_s: seconds of steps without a chunk.
    """

    def __init__(self, *, weight: float = 0.1, min_prompt_tokens: int = 64) -> None:
        self._weight = weight
        self._min_prompt_tokens = min_prompt_tokens
        self.prefill_tokens_per_s: float | None = None
        self.decode_step_s: float | None = None

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """Take in one step; a small chunk says nothing about either speed."""
        num_prompt_tokens = plan.num_prompt_tokens
        if not num_prompt_tokens:
            self.decode_step_s = self._smooth(self.decode_step_s, seconds)
        elif num_prompt_tokens >= self._min_prompt_tokens and seconds > 0:
            per_s = num_prompt_tokens / seconds
            self.prefill_tokens_per_s = self._smooth(self.prefill_tokens_per_s, per_s)

    def _smooth(self, before: float | None, value: float) -> float:
        return value if before is None else before + self._weight * (value - before)
