"""How a read finds that its source was still where it read from: by the seal behind the region.

A fence takes the seal along with the data. So a read fetches it when all data is here: a seal of
the generation that was asked for proves that the region had not moved when the last byte left.
"""

from __future__ import annotations

import ctypes

from core.memory_region import SEAL_BYTES, seal_of
from kv_transfer.nixl.agent import Descriptor, NixlAgent
from kv_transfer.transport import RemoteRegion

_NUM_SLOTS = 1024


class Seals:
    """Memory of its own for the seals that reads fetch, one slot each.

    Args:
        agent: has the memory registered until it is closed; close it before this is dropped.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._memory = (ctypes.c_char * (_NUM_SLOTS * SEAL_BYTES))()
        self._address = ctypes.addressof(self._memory)
        self._free = list(range(_NUM_SLOTS))
        agent.register(self._address, len(self._memory))

    def take(self) -> int | None:
        """Return a free slot; None while that many seals are under way."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Free a slot that no seal can land in any more."""
        self._free.append(slot)

    def place(self, slot: int) -> Descriptor:
        """Return where a seal is to land."""
        return self._address + slot * SEAL_BYTES, SEAL_BYTES

    def is_of(self, slot: int, region: RemoteRegion) -> bool:
        """Return whether the seal that landed is of this region's generation."""
        start = slot * SEAL_BYTES
        return self._memory.raw[start : start + SEAL_BYTES] == seal_of(region.generation)


def seal_descriptor(region: RemoteRegion) -> Descriptor:
    """Return where a peer's region has its seal."""
    return region.address + region.num_bytes, SEAL_BYTES
