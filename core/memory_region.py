"""What an executor and a transport share of one rank's KV memory, without knowing each other."""

from __future__ import annotations

from typing import Protocol

SEAL_BYTES = 16
"""Size of a region's seal."""


def seal_of(generation: int) -> bytes:
    """Return the seal of a region's generation: what tells a peer that has read from the region
    that it was still there. A fence takes it along, so who reads an old address finds none."""
    return b"KVregion" + generation.to_bytes(SEAL_BYTES - 8, "little")


class MemoryRegion(Protocol):
    """Contiguous, huge-page-aligned host memory that a fence may move.

    `address` and `generation` change together, only inside `fence` and only between steps; whoever
    keeps views of the memory compares `generation` at the start of each step and makes them anew.
    """

    @property
    def address(self) -> int:
        """Current base address."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size; constant."""
        ...

    @property
    def generation(self) -> int:
        """Counts the moves, from 0. Descriptors carry it, a stale one is refused."""
        ...

    def view(self) -> memoryview:
        """Return a writable byte view of the whole region at its current address."""
        ...

    def sealed_view(self) -> memoryview:
        """Return `view` with the seal behind it, `SEAL_BYTES` longer: what a transport registers.
        Nobody but the region writes the seal."""
        ...
