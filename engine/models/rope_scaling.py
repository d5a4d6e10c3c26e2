"""How a model stretches its rotary frequencies beyond the context that it was first trained for.

Values only, so that a spec can be read without torch; `rope_frequencies` computes with them. All of
these are fixed per model. "Dynamic" scaling is not among them: within the model's own context it is
no scaling at all, and beyond it keys in the cache would depend on how long a sequence had become.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class LinearScaling(msgspec.Struct, frozen=True, tag="linear"):
    """All frequencies divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: Positive


class Llama3Scaling(msgspec.Struct, frozen=True, tag="llama3"):
    """Llama 3.1's: frequencies whose wavelength exceeds the original context are divided.

    Attributes:
        factor: what low frequencies are divided by.
        low_freq_factor, high_freq_factor: original context / wavelength below which a frequency
            is divided, and above which it is kept; between them both are mixed.
        original_positions: the context of the first training.
    """

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_positions: PositiveInt


class YarnScaling(msgspec.Struct, frozen=True, tag="yarn"):
    """YaRN (Peng et al. 2023): a ramp between kept and divided frequencies.

    Attributes:
        factor: what low frequencies are divided by.
        original_positions: the context of the first training.
        attention_factor: multiplies cosines and sines, and so each score by its square.
        beta_fast, beta_slow: rotations within the original context where the ramp starts and ends.
        truncate: round the ramp's ends to whole dimensions.
    """

    factor: Positive
    original_positions: PositiveInt
    attention_factor: Positive
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True

    @property
    def max_positions(self) -> int:
        """The context that it was stretched to."""
        return int(self.factor * self.original_positions)


class FrequencyDivisors(msgspec.Struct, frozen=True, tag="divisors"):
    """One divisor a frequency, head_dim / 2 of them: how GGUF stores Llama 3's scaling."""

    divisors: tuple[Positive, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors


def stretched_context(stated: int, scaling: RopeScaling | None) -> int:
    """Return a model's context in tokens: files state YaRN's beside the original one, or not."""
    return max(stated, scaling.max_positions) if isinstance(scaling, YarnScaling) else stated


def yarn_attention_factor(factor: float) -> float:
    """Return the paper's attention factor for a stretch: 0.1 ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
