"""Checks what has landed against the checksums that came with it (`kv_transfer.verify`).

    notification -> sum of its blocks, on the fabric's thread -> equal: it counts as landed
                                                              -> else: the attempt failed

The blocks are the attempt's alone until it ends, so a sum that is known later than that says
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from core.messages import PrefillAsk, WriteNotification
from kv_transfer.descriptors import spans_of
from kv_transfer.handoff.block_runs import block_ids_of
from kv_transfer.transfer_driver import TransferDriver

OnSummed = Callable[[WriteNotification, asyncio.Future[int]], None]


class Verification:
    """Sums the blocks of writes.

    Args:
        on_summed: called on the loop with a write and its blocks' sum.
    """

    def __init__(self, fabric: TransferDriver, block_bytes: int, on_summed: OnSummed) -> None:
        self._fabric = fabric
        self._block_bytes = block_bytes
        self._on_summed = on_summed

    def begin(self, ask: PrefillAsk, write: WriteNotification) -> None:
        """Sum what a write of this ask's attempt brought; blocks that were not asked for are left
        out, which no sum survives."""
        first = max(write.first_block - ask.first_block, 0)
        blocks = block_ids_of(ask.blocks)[first : first + write.num_blocks]
        spans = spans_of(blocks, self._block_bytes)
        summed = self._fabric.call(lambda transport: transport.checksum(spans))
        summed.add_done_callback(partial(self._on_summed, write))
