"""A memory region of plain bytes for simulation: no mapping, the semantics of a fence."""

from __future__ import annotations

from collections.abc import Sequence

from core.memory_region import SEAL_BYTES, Run, checksum_pieces, checksum_step, seal_of


class BytesRegion:
    """A `core.memory_region.MemoryRegion` over a bytearray, with made-up addresses.

    A fence copies the data to fresh bytes at a fresh address and zeroes the old ones, which stay as
    the sink: who wrote through a view or a registration of before writes there, and who reads
    through one reads zeros, as in `HostRegion`.

    Args:
        num_bytes: size.
        address: first base address; every fence takes the next free one.
    """

    def __init__(self, num_bytes: int, *, address: int = 1 << 30) -> None:
        if num_bytes <= 0:
            msg = f"BytesRegion({num_bytes}): must be greater than 0"
            raise ValueError(msg)
        self._num_bytes = num_bytes
        self._memory = bytearray(num_bytes) + seal_of(0)
        self._address = address
        self._generation = 0
        self._sinks: list[bytearray] = []

    @property
    def address(self) -> int:
        """Current base address."""
        return self._address

    @property
    def num_bytes(self) -> int:
        """Size."""
        return self._num_bytes

    @property
    def generation(self) -> int:
        """Fences so far."""
        return self._generation

    @property
    def num_sinks(self) -> int:
        """Former addresses that still swallow writes."""
        return len(self._sinks)

    def view(self) -> memoryview:
        """Return a writable view at the current address."""
        return self.sealed_view()[: self._num_bytes]

    def sealed_view(self) -> memoryview:
        """Return a writable view that goes on over the seal."""
        return memoryview(self._memory)

    def checksum(self, runs: Sequence[Run]) -> int:
        """Return the CRC-32 of these bytes."""
        checksum, view = 0, self.view()
        for offset, num_bytes in checksum_pieces(runs):
            checksum = checksum_step(view[offset : offset + num_bytes], checksum)
        return checksum

    def fence(self) -> int:
        """Make every address that peers know a sink, keep the data, return the new generation."""
        sink, self._memory = self._memory, bytearray(self._memory)
        sink[:] = bytes(len(sink))
        self._sinks.append(sink)
        self._address += len(sink)
        self._generation += 1
        self._memory[-SEAL_BYTES:] = seal_of(self._generation)
        return self._generation

    def release_sinks(self) -> None:
        """Forget the former addresses."""
        self._sinks.clear()

    def close(self) -> None:
        """Nothing to free."""
        self._sinks.clear()
