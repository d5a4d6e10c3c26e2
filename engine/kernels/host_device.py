"""From the host to a device without waiting for it.

A copy from pageable memory waits for all that the device has queued, and `torch.tensor(values,
device=...)` and indexing with a list are such copies. So values pass through page-locked memory and
are copied in stream order. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Queue a copy of a CPU tensor; torch keeps the page-locked memory until it is done."""
    if device.type == "cpu":
        return host
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def integers_on(device: torch.device, values: Sequence[int]) -> Tensor:
    """Return int64 [len(values)]."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def floats_on(device: torch.device, values: Sequence[float]) -> Tensor:
    """Return float32 [len(values)]."""
    return to_device(torch.tensor(values, dtype=torch.float32), device)


class StepBuffer:
    """All integers of a step, copied at once.

    On a device they go through preallocated memory: equal sizes mean equal device addresses, which
    is what a captured CUDA graph replays on. Host buffers are used in turn, so that one is written
    again only when the step that read it was collected.

    Args:
        device: where steps run.
        capacity: integers a step; a larger step makes the buffers grow.
        num_inflight: steps that may be queued at once.
    """

    def __init__(self, device: torch.device, capacity: int, num_inflight: int) -> None:
        self._device = device
        self._num_buffers = num_inflight + 1
        self._turn = 0
        self._host: list[Tensor] = []
        self._on_device = torch.empty(0, dtype=torch.int64, device=device)
        if device.type != "cpu":
            self._allocate(capacity)

    def copy(self, *sections: Sequence[int]) -> list[Tensor]:
        """Return each section as int64 [len(section)] on the device, valid until the next copy."""
        sizes = [len(section) for section in sections]
        packed = torch.tensor([*chain.from_iterable(sections)], dtype=torch.int64)
        if self._device.type == "cpu":
            return list(torch.split(packed, sizes))
        if len(packed) > len(self._on_device):
            self._allocate(2 * len(packed))
        self._turn = (self._turn + 1) % self._num_buffers
        staged = self._host[self._turn][: len(packed)].copy_(packed)
        target = self._on_device[: len(packed)]
        return list(torch.split(target.copy_(staged, non_blocking=True), sizes))

    def _allocate(self, capacity: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = [
            torch.empty(capacity, dtype=torch.int64, pin_memory=pinned)
            for _ in range(self._num_buffers)
        ]
        self._on_device = torch.empty(capacity, dtype=torch.int64, device=self._device)
