"""What an executor and a transport share of one rank's KV memory, without knowing each other."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

SEAL_BYTES = 16
"""Size of a region's seal."""


def seal_of(generation: int) -> bytes:
    """Return the seal of a region's generation: what tells a peer that has read from the region
    that it was still there. A fence takes it along, so who reads an old address finds none."""
    return b"KVregion" + generation.to_bytes(SEAL_BYTES - 8, "little")


Run = tuple[int, int]
"""(offset, number of bytes) in a region."""

CHECKSUM_STEP_BYTES = 1 << 20
"""What is read at once for a checksum: a fence may have to wait for it."""


def checksum_step(memory: memoryview, checksum: int) -> int:
    """Return the CRC-32 of what gave `checksum` with `memory` behind it.

    CRC-32 finds every burst of up to 32 wrong bits and all but one in 2^32 of other corruptions,
    and is in the standard library, which releases the GIL for it; 1 GB/s were measured.
    """
    return zlib.crc32(memory, checksum)


def checksum_pieces(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield the runs in pieces of `CHECKSUM_STEP_BYTES` at most, in order."""
    for offset, num_bytes in runs:
        for start in range(offset, offset + num_bytes, CHECKSUM_STEP_BYTES):
            yield start, min(CHECKSUM_STEP_BYTES, offset + num_bytes - start)


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

    def checksum(self, runs: Sequence[Run]) -> int:
        """Return the CRC-32 of these bytes, one run after the other. On any thread, also along with
        a fence, which changes no byte.

        Raises:
            FabricError: the region is closed.
        """
        ...

    def sealed_view(self) -> memoryview:
        """Return `view` with the seal behind it, `SEAL_BYTES` longer: what a transport registers.
        Nobody but the region writes the seal."""
        ...
