"""Rotary position embeddings (Su et al. 2021), in the half-split order of Hugging Face's llama."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.rope_frequencies import exponents, rope_frequencies
from engine.models.rope_scaling import RopeScaling


def torch_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return float32 [head_dim / 2], radians a position; powers as torch rounds them."""
    powers = theta ** torch.as_tensor(exponents(head_dim))
    return torch.as_tensor(rope_frequencies(head_dim, theta, scaling, powers.numpy()))


def rope_tables(
    max_positions: int, frequencies: Tensor, factor: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return float32 (cos, sin), each [max_positions, head_dim], for `rotate`.

    Args:
        max_positions: rows.
        frequencies: float32 [head_dim / 2], radians a position.
        factor: multiplies both (YaRN); 1.0 for plain rotations.
        device: where the tables are kept.
    """
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return (
        torch.cat((cos, cos), dim=1).to(device),
        torch.cat((-sin, sin), dim=1).to(device),
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x[i], x[i + head_dim / 2]) of each head.

    Rolling by half a head swaps the halves, and the sign that the first half needs is in `sin`.

    Args:
        x: float32 [tokens, heads, head_dim].
        cos: [tokens, 1, head_dim].
        sin: the same shape.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).addcmul_(swapped, sin)
