"""Values from the device: the only places where the host waits for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def integers(tensor: Tensor) -> list[int]:
    """Wait for an integer tensor [n]."""
    untyped: Any = tensor
    return untyped.tolist()


def floats(tensor: Tensor) -> list[float]:
    """Wait for a float tensor [n]."""
    untyped: Any = tensor
    return untyped.tolist()


def table(tensor: Tensor) -> list[list[Any]]:
    """Wait for a tensor [rows, columns]."""
    untyped: Any = tensor
    return untyped.tolist()
