"""KV memory that remembers which of its former addresses are still mapped."""

from __future__ import annotations

from kv_transfer.bytes_region import BytesRegion


class SimRegion(BytesRegion):
    """A `BytesRegion` that can be asked what lies at an address."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._memory_by_address = {self.address: self.view()}

    def memory_at(self, address: int) -> memoryview | None:
        """Return what a write to this base address reaches: the pool, a sink, or nothing (such a
        write would end the process)."""
        return self._memory_by_address.get(address)

    def fence(self) -> int:
        """Move, as `BytesRegion`; the former address stays mapped."""
        generation = super().fence()
        self._memory_by_address[self.address] = self.view()
        return generation

    def release_sinks(self) -> None:
        """Unmap the former addresses."""
        super().release_sinks()
        self._memory_by_address = {self.address: self.view()}
