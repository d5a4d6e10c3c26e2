"""Which prompt blocks each worker's caches hold, as far as the cache ledger has told.

One map for all workers, block -> bit mask of the workers that hold it, so a block that many hold
costs once. The index is a hint: no correctness decision reads it, so a key is 60 bits of the
block's hash (the largest integer that CPython keeps in 32 bytes; among 10 million blocks the
chance of any collision is 4e-5).

A worker's bit is never cleared block by block when the worker goes or sends a snapshot. Its bit is
retired instead, masked out of every answer at once, and swept from the map when the retired bits
outnumber half of the map: forgetting costs nothing now and O(1) a block in the long run.

    bit      0         1         2
    owner    prefill-0 (retired) decode-0
    block A  1         1         0      -> {prefill-0}
    block B  0         1         0      -> {}: swept later
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.block_hash import BlockHash
from core.ids import Boot, WorkerId

_KEY_BITS = (1 << 60) - 1
_MAX_SHARED_MASKS = 1 << 16


class PrefixIndex:
    """Block hashes by worker; at most 100 bytes a distinct block (tests measure it)."""

    def __init__(self) -> None:
        self._mask_by_key: dict[int, int] = {}
        self._shared_masks: dict[int, int] = {}
        self._bit_by_worker: dict[WorkerId, int] = {}
        self._worker_by_bit: dict[int, WorkerId] = {}
        self._boot_by_worker: dict[WorkerId, Boot] = {}
        self._count_by_bit: dict[int, int] = {}
        self._live = 0
        self._num_retired = 0

    def apply_snapshot(self, worker_id: WorkerId, boot: Boot, hashes: Iterable[BlockHash]) -> None:
        """Replace all that is known of a worker."""
        self.forget(worker_id)
        self._store(self._bit_of(worker_id, boot), hashes)

    def apply_delta(
        self,
        worker_id: WorkerId,
        boot: Boot,
        stored: Iterable[BlockHash],
        evicted: Iterable[BlockHash],
    ) -> None:
        """Add and remove blocks of a worker; another boot than the known one starts from nothing.

        A hash that is in both was evicted and stored again, so it is held.
        """
        if self._boot_by_worker.get(worker_id, boot) != boot:
            self.forget(worker_id)
        bit = self._bit_of(worker_id, boot)
        self._evict(bit, evicted)
        self._store(bit, stored)

    def forget(self, worker_id: WorkerId) -> None:
        """Drop a worker; one that is not known is ignored."""
        bit = self._bit_by_worker.pop(worker_id, None)
        if bit is None:
            return
        del self._boot_by_worker[worker_id]
        del self._worker_by_bit[bit]
        self._live &= ~bit
        self._num_retired += self._count_by_bit[bit]
        if 2 * self._num_retired >= len(self._mask_by_key):
            self._sweep()

    def boot_of(self, worker_id: WorkerId) -> Boot | None:
        """Return the boot whose blocks are indexed, None for an unknown worker."""
        return self._boot_by_worker.get(worker_id)

    def num_blocks(self, worker_id: WorkerId) -> int:
        """Return how many blocks a worker holds."""
        bit = self._bit_by_worker.get(worker_id)
        return 0 if bit is None else self._count_by_bit[bit]

    def __len__(self) -> int:
        """Return the number of distinct blocks in the map."""
        return len(self._mask_by_key)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Return how many leading blocks of a prompt each worker holds; those without any are left
        out.

        Radix caches evict leaves first, so who holds a block holds all before it, and the set of
        holders only shrinks along the prompt. Hence a search by halves over ranges of the prompt:
        a range whose two ends have the same holders is never looked into.
        """
        matched: dict[WorkerId, int] = {}
        if not hashes:
            return matched
        # (first, end, holders): these hold block first - 1 and lack block end.
        ranges = [(0, len(hashes), self._live)]
        while ranges:
            first, end, holders = ranges.pop()
            if first == end:
                self._record(holders, first, matched)
                continue
            middle = (first + end) // 2
            further = holders & self._holders(hashes[middle])
            if further:
                ranges.append((middle + 1, end, further))
            if holders != further:
                ranges.append((first, middle, holders & ~further))
        return matched

    def _record(self, holders: int, num_blocks: int, matched: dict[WorkerId, int]) -> None:
        if num_blocks == 0:
            return
        while holders:
            bit = holders & -holders
            matched[self._worker_by_bit[bit]] = num_blocks
            holders ^= bit

    def _holders(self, block: BlockHash) -> int:
        return self._mask_by_key.get(_key(block), 0)

    def _bit_of(self, worker_id: WorkerId, boot: Boot) -> int:
        bit = self._bit_by_worker.get(worker_id)
        if bit is None:
            bit = 1
            while bit in self._count_by_bit:
                bit <<= 1
            self._bit_by_worker[worker_id] = bit
            self._worker_by_bit[bit] = worker_id
            self._boot_by_worker[worker_id] = boot
            self._count_by_bit[bit] = 0
            self._live |= bit
        return bit

    def _store(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        masks = self._mask_by_key
        num_new = 0
        for block in hashes:
            key = _key(block)
            mask = masks.get(key, 0)
            if not mask & bit:
                num_new += 1
                masks[key] = self._shared(mask | bit)
        self._count_by_bit[bit] += num_new

    def _evict(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        masks = self._mask_by_key
        for block in hashes:
            key = _key(block)
            mask = masks.get(key, 0)
            if mask & bit:
                self._count_by_bit[bit] -= 1
                if mask == bit:
                    del masks[key]
                else:
                    masks[key] = self._shared(mask ^ bit)

    def _shared(self, mask: int) -> int:
        """Return one object for all equal masks; beyond 256 CPython would keep one a block."""
        if len(self._shared_masks) >= _MAX_SHARED_MASKS:
            self._shared_masks.clear()
        return self._shared_masks.setdefault(mask, mask)

    def _sweep(self) -> None:
        live = self._live
        self._shared_masks.clear()
        self._mask_by_key = {
            key: self._shared(mask & live) for key, mask in self._mask_by_key.items() if mask & live
        }
        self._count_by_bit = {bit: n for bit, n in self._count_by_bit.items() if bit & live}
        self._num_retired = 0


def _key(block: BlockHash) -> int:
    return int.from_bytes(block[:8], "little") & _KEY_BITS
