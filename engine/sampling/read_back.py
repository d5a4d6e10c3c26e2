"""Values from the device: the only place where the host waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ReadBack:
    """Tensors on their way to the host.

    Copies are queued at once, behind what computes the tensors, and an event behind them; `wait`
    waits for that event and not for the steps that were queued since.

    Args:
        tensors: what to read; may be empty, `wait` then waits all the same.
        device: where they are.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._event: torch.Event | None = None
        if device.type == "cpu":
            self._host = list(tensors)
            return
        # torch makes the target of such a copy page-locked.
        self._host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._event = torch.Event(device)
        self._event.record()

    def wait(self) -> list[Tensor]:
        """Return the tensors on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def integers(tensor: Tensor) -> list[int]:
    """Return the values of an integer tensor [n]."""
    untyped: Any = tensor
    return untyped.tolist()


def floats(tensor: Tensor) -> list[float]:
    """Return the values of a float tensor [n]."""
    untyped: Any = tensor
    return untyped.tolist()


def table(tensor: Tensor) -> list[list[Any]]:
    """Return the values of a tensor [rows, columns]."""
    untyped: Any = tensor
    return untyped.tolist()
