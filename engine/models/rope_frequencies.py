"""The rotary frequencies of a model, scaled, in float32 as transformers computes them.

At position 8,191 another rounding moves an angle by 5e-4, so the steps are the reference's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.rope_scaling import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return float32 [head_dim / 2], radians a position.

    Args:
        head_dim: even.
        theta: base of the frequencies (Su et al. 2021).
        scaling: None for the plain ones.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    powers = theta**exponents
    plain = 1.0 / powers
    match scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, scaling)
        case YarnScaling(factor=factor):
            kept = 1 - _yarn_ramp(head_dim, theta, scaling)
            return 1.0 / (factor * powers) * (1 - kept) + plain * kept
        case FrequencyDivisors(divisors=divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return what cosines and sines are multiplied by."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original, factor = scaling.original_positions, scaling.factor
    wavelength = 2 * math.pi / plain
    long = wavelength > original / low
    scaled = torch.where(long, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    mixed = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(~(wavelength < original / high) & ~long, mixed, scaled)


def _yarn_ramp(head_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Return 0 where a frequency is kept to 1 where it is divided, [head_dim / 2]."""

    def dimension(rotations: float) -> float:
        """Return the dimension that turns so often within the original context."""
        turns = scaling.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # the reference's own way around a division by zero
    steps = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)
    return steps.clamp(0, 1)
