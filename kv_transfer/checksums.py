"""Checksums of spans of a registered region, alike for all transports."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import FabricError
from core.memory_region import MemoryRegion
from kv_transfer.transport import Span


def checksum_of(region: MemoryRegion | None, spans: Sequence[Span]) -> int:
    """Return the CRC-32 of a region's bytes, one span after the other.

    Args:
        region: what the transport registered; None before.

    Raises:
        FabricError: nothing is registered.
    """
    if region is None:
        msg = "a checksum before register"
        raise FabricError(msg)
    return region.checksum([(span.offset, span.num_bytes) for span in spans])
