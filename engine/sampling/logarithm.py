"""One natural logarithm in float32 that torch, C++ and Triton can agree on bit for bit.

Cephes `logf` (S. Moshier): x = 2^e * m with m in [sqrt(1/2), sqrt(2)), f = m - 1, and

    log(x) = f + (-f^2 / 2 + (e * C2 + f^3 * P(f))) + e * C1,   C1 + C2 = log 2

Every product and every sum below is rounded on its own, in this order: no fused multiply-add. Error
under 2 units in the last place for normal x > 0; other x are not defined.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# Exactly these floats, highest power first.
_COEFFICIENTS: Final = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_LOG2_HIGH: Final = 0.693359375
_LOG2_LOW: Final = -2.12194440e-4
_SQRT_HALF_BITS: Final = 0x3F3504F3


def log_f32(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive normal float32 values, as a new tensor."""
    offset = x.view(torch.int32) - _SQRT_HALF_BITS
    exponent = offset >> 23
    f = (x.view(torch.int32) - (exponent << 23)).view(torch.float32)
    f.sub_(1.0)
    e = exponent.to(torch.float32)
    square = f * f
    y = f * _COEFFICIENTS[0]
    for coefficient in _COEFFICIENTS[1:-1]:
        y.add_(coefficient).mul_(f)
    y.add_(_COEFFICIENTS[-1]).mul_(f).mul_(square)
    y.add_(e * _LOG2_LOW)
    y.sub_(square.mul_(0.5))
    return f.add_(y).add_(e.mul_(_LOG2_HIGH))
