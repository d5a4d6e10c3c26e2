"""Host memory that a fence can move: the pool of a rank whose compute and fabric run on CPUs.

One private, anonymous mapping on huge pages. A fence moves the pages, not the bytes:

    before      address A -> pages with the KV                registered, known to peers
    fence()     address A -> empty (the sink)                 late writes of peers land here
                address B -> the same pages with the KV       to be registered anew

and the seal with them, by `mremap(MREMAP_MAYMOVE | MREMAP_DONTUNMAP)` (Linux 5.7, mremap(2)). The
sink stays mapped until `release_sinks`, because a write to an unmapped address killed the target
on TCP.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Sequence

from core.errors import FabricError
from core.memory_region import SEAL_BYTES, Run, checksum_pieces, checksum_step, seal_of

HUGE_PAGE_BYTES = 2 << 20

_PREFAULT_BYTES = 2 << 20
"""A step of `prefault`: what a fence may have to wait for."""

_PROT_NONE = 0
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_FAILED = ctypes.c_void_p(-1).value


class HostRegion:
    """A `core.memory_region.MemoryRegion` that its owner can fence.

    Args:
        num_bytes: usable size; with the seal behind it, the mapping is rounded up to whole huge
            pages.

    Raises:
        FabricError: not Linux, or no memory; names the call and the reason.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes <= 0:
            msg = f"HostRegion({num_bytes}): must be greater than 0"
            raise ValueError(msg)
        self._libc = _libc()
        self._num_bytes = num_bytes
        self._mapped_bytes = -(-(num_bytes + SEAL_BYTES) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._generation = 0
        self._sinks: list[int] = []
        self._lock = threading.Lock()  # between whatever reads beside the owner, and a new address
        self._address = self._map_aligned(mmap.PROT_READ | mmap.PROT_WRITE)
        # EINVAL where the kernel has no huge pages: slower, and as right.
        self._libc.madvise(self._address, self._mapped_bytes, _MADV_HUGEPAGE)
        self._seal()

    @property
    def address(self) -> int:
        """Current base address; a multiple of 2 MiB."""
        if not self._address:
            msg = "the region is closed"
            raise FabricError(msg)
        return self._address

    @property
    def num_bytes(self) -> int:
        """Usable size."""
        return self._num_bytes

    @property
    def generation(self) -> int:
        """Fences so far."""
        return self._generation

    @property
    def num_sinks(self) -> int:
        """Former addresses that are still mapped."""
        return len(self._sinks)

    def view(self) -> memoryview:
        """Return a writable view of bytes at the current address.

        A view taken before a fence shows the sink. None may be used after `close`, or after the
        `release_sinks` that follows its fence.
        """
        return self._view(self._num_bytes)

    def sealed_view(self) -> memoryview:
        """Return a writable view that goes on over the seal; the rules of `view` hold."""
        return self._view(self._num_bytes + SEAL_BYTES)

    def checksum(self, runs: Sequence[Run]) -> int:
        """Return the CRC-32 of these bytes; see `MemoryRegion.checksum`."""
        checksum = 0
        for offset, num_bytes in checksum_pieces(runs):
            with self._lock:
                checksum = checksum_step(self.view()[offset : offset + num_bytes], checksum)
        return checksum

    def prefault(self) -> None:
        """Back the region with pages, so that no kernel's and no peer's first write to one waits
        for its zeroing; changes no byte.

        It took 0.6-0.9 s for 256 MiB that the host had to find first: call it on another thread
        (it releases the GIL and may run along with everything, fences too).

        Raises:
            FabricError: no memory.
        """
        for start in range(0, self._mapped_bytes, _PREFAULT_BYTES):
            num_bytes = min(_PREFAULT_BYTES, self._mapped_bytes - start)
            with self._lock:
                if not self._address:
                    return
                address = self._address + start
                if self._libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0:
                    continue
                if ctypes.get_errno() == errno.EINVAL:  # before Linux 5.14: pages come when used
                    return
                error = _error("madvise(MADV_POPULATE_WRITE)", num_bytes)
                raise error

    def fence(self) -> int:
        """Make every address that peers know a sink, keep the data, return the new generation.

        Call it between steps (kernels re-read the base each step) and with no write of one's own in
        flight (it would read the sink's zeros and send them under a valid notification). A peer
        that is reading from here, and a read of one's own into here, end as REFUSED. A copy that
        the kernel is in the middle of may still hold pages: wait 20 ms before reusing blocks. Then
        register the region again.

        Raises:
            FabricError: the kernel refused; the region is as it was.
        """
        with self._lock:
            # First, so that a read of our own that ends meanwhile does not find it unchanged.
            self._generation += 1
            try:
                self._move()
            except FabricError:
                self._generation -= 1
                raise
            self._seal()
        return self._generation

    def release_sinks(self) -> None:
        """Unmap all former addresses; only when no boot that knew one can write any more."""
        for sink in self._sinks:
            self._libc.munmap(sink, self._mapped_bytes)
        self._sinks.clear()

    def close(self) -> None:
        """Unmap everything; idempotent. The transport that registered it must be closed before."""
        self.release_sinks()
        with self._lock:
            if self._address:
                self._libc.munmap(self._address, self._mapped_bytes)
                self._address = 0

    def _view(self, num_bytes: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * num_bytes).from_address(self.address)).cast("B")

    def _seal(self) -> None:
        self._view(self._num_bytes + SEAL_BYTES)[self._num_bytes :] = seal_of(self._generation)

    def _move(self) -> None:
        old = self.address
        new = self._map_aligned(_PROT_NONE)
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        moved = self._libc.mremap(old, self._mapped_bytes, self._mapped_bytes, flags, new)
        if moved != new:
            error = _error("mremap(MREMAP_DONTUNMAP)", self._mapped_bytes)
            self._libc.munmap(new, self._mapped_bytes)
            raise error
        # A late write should cost a small page.
        self._libc.madvise(old, self._mapped_bytes, _MADV_NOHUGEPAGE)
        self._sinks.append(old)
        for sink in self._sinks:
            self._libc.madvise(sink, self._mapped_bytes, mmap.MADV_DONTNEED)
        self._address = new

    def _map_aligned(self, protection: int) -> int:
        """Map `_mapped_bytes` at a multiple of the huge page size (huge pages move whole only
        between such addresses)."""
        room = self._mapped_bytes + HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = self._libc.mmap(None, room, protection, flags, -1, 0)
        if start is None or start == _MAP_FAILED:
            error = _error("mmap", self._mapped_bytes)
            raise error
        aligned = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = aligned + self._mapped_bytes
        self._libc.munmap(start, aligned - start)  # of nothing: EINVAL, and no harm
        self._libc.munmap(end, start + room - end)
        return aligned


def _error(call: str, num_bytes: int) -> FabricError:
    reason = os.strerror(ctypes.get_errno())
    return FabricError(f"{call} of {num_bytes} bytes for the KV pool: {reason}")


def _libc() -> ctypes.CDLL:
    if sys.platform != "linux":
        msg = f"KV memory needs Linux (mremap with MREMAP_DONTUNMAP); this is {sys.platform}"
        raise FabricError(msg)
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.mremap.restype = address
    libc.mremap.argtypes = [address, size, size, number, address]
    libc.madvise.argtypes = [address, size, number]
    libc.munmap.argtypes = [address, size]
    return libc
