"""The rotary frequencies of a model, scaled, in float32 as transformers computes them.

At position 8,191 another rounding moves an angle by 5e-4, so the steps are the reference's own: a
scalar over an array is its reciprocal times the scalar there, and here. Only powers are left to the
caller: libraries round them differently in the last bit.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from engine.models.rope_scaling import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)

Floats = npt.NDArray[np.float32]


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, powers: Floats | None = None
) -> Floats:
    """Return float32 [head_dim / 2], radians a position.

    Args:
        head_dim: even.
        theta: base of the frequencies (Su et al. 2021).
        scaling: None for the plain ones.
        powers: float32, theta ** `exponents(head_dim)`; by default the correctly rounded ones.
    """
    if powers is None:
        base = np.float64(np.float32(theta))
        powers = np.power(base, exponents(head_dim), dtype=np.float64).astype(np.float32)
    plain = _reciprocal(powers)
    match scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / np.float32(factor)
        case Llama3Scaling():
            return _llama3(plain, scaling)
        case YarnScaling(factor=factor):
            ramp = _yarn_ramp(head_dim, theta, scaling)
            kept = np.subtract(1, ramp, dtype=np.float32)
            divided = _reciprocal(np.float32(factor) * powers)
            ramped: Floats = divided * np.subtract(1, kept, dtype=np.float32)
            return ramped + plain * kept
        case FrequencyDivisors(divisors=divisors):
            return plain / np.array(divisors, np.float32)


def exponents(head_dim: int) -> Floats:
    """Return float32 [head_dim / 2]: what the base is raised to."""
    return np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return what cosines and sines are multiplied by."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def _reciprocal(x: Floats) -> Floats:
    return np.divide(np.float32(1.0), x, dtype=np.float32)


def _llama3(plain: Floats, scaling: Llama3Scaling) -> Floats:
    low = np.float32(scaling.low_freq_factor)
    original, factor = scaling.original_positions, np.float32(scaling.factor)
    wavelength = _reciprocal(plain) * np.float32(2 * math.pi)
    long = wavelength > np.float32(original / scaling.low_freq_factor)
    short = wavelength < np.float32(original / scaling.high_freq_factor)
    scaled = np.where(long, plain / factor, plain)
    turns = _reciprocal(wavelength) * np.float32(original)
    smooth = (turns - low) / np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
    mixed = (1 - smooth) * scaled / factor + smooth * scaled
    return np.where(~short & ~long, mixed, scaled)


def _yarn_ramp(head_dim: int, theta: float, scaling: YarnScaling) -> Floats:
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
    steps = np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)
    return np.clip(steps / np.float32(last - first), 0, 1)
