"""Posts an attempt's writes: ids to spans, one notification a write, peers learnt on demand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import msgspec

from core.ids import Boot
from core.messages import PrefillAsk, RegionDescriptor, WriteNotification
from kv_transfer.descriptors import paired_spans
from kv_transfer.handoff.prefill_messages import Push
from kv_transfer.transfer_thread import TransferThread, WriteOutcome
from kv_transfer.transport import PeerName, RemoteRegion, Transport, WriteState

_RANK_PAIR = (0, 0)
_SMOOTHING = 0.2

MEASURED_BYTES = 1 << 20
"""Writes from this size on tell the fabric's speed: a small one takes as long as its latency, which
made a worker look a thousand times slower than it was, and routers avoid it for good."""

_log = logging.getLogger(__name__)

OnEnd = Callable[[str | None], None]
"""Called with None when the write is DONE, else with the reason of its failure."""


def peer_name(region: RegionDescriptor) -> PeerName:
    """Return the agent name of a region's owner."""
    return PeerName(f"{region.worker_id}@{region.boot}")


class Pusher:
    """Writes blocks of this worker into blocks of decode workers."""

    def __init__(self, fabric: TransferThread, boot: Boot) -> None:
        self._fabric = fabric
        self._boot = boot
        self._generation_by_peer: dict[PeerName, int] = {}
        self._connected: set[PeerName] = set()
        self.num_blocks = 0
        self.num_bytes = 0
        self.num_failed = 0
        self.bytes_per_s: float | None = None

    def push(self, ask: PrefillAsk, push: Push, on_end: OnEnd) -> None:
        """Post one write; `on_end` is called on the loop, and nothing is posted twice."""
        region = ask.region
        self._learn(region)
        remote = RemoteRegion(
            peer=peer_name(region),
            boot=region.boot,
            address=region.address,
            num_bytes=region.num_bytes,
            generation=region.generation,
        )
        local, target = paired_spans(push.sources, push.targets, region.block_bytes)
        tag = WriteNotification(
            handoff=ask.handoff,
            source=self._boot,
            target=region.boot,
            rank_pair=_RANK_PAIR,
            generation=region.generation,
            first_block=push.first_block,
            num_blocks=len(push.targets),
        )
        written = self._fabric.write(remote, local, target, msgspec.msgpack.encode(tag))
        is_telling = remote.peer in self._connected  # else its time is that of connecting, too
        ended = partial(self._ended, remote.peer, len(push.targets), on_end, is_telling=is_telling)
        written.add_done_callback(ended)

    async def renew(self, make: Callable[[], Transport]) -> None:
        """Destroy the agent and go on with a new one; writes pushed from now on are the new one's.

        Args:
            make: returns a transport that has the region registered; runs on the fabric's thread.
        """
        self._generation_by_peer.clear()
        self._connected.clear()
        await self._fabric.renew(make)

    def _learn(self, region: RegionDescriptor) -> None:
        """Add the peer anew when its region moved, or after a write to it failed."""
        name = peer_name(region)
        if self._generation_by_peer.get(name) == region.generation:
            return
        self._generation_by_peer[name] = region.generation
        added = self._fabric.call(lambda transport: transport.add_peer(name, region.metadata))
        added.add_done_callback(partial(self._added, name))

    def _added(self, name: PeerName, added: asyncio.Future[None]) -> None:
        error = None if added.cancelled() else added.exception()
        if error is not None:  # its writes fail with "unknown peer"
            self._generation_by_peer.pop(name, None)
            _log.warning("the fabric does not take %s: %s", name, error)

    def _ended(
        self,
        peer: PeerName,
        num_blocks: int,
        on_end: OnEnd,
        written: asyncio.Future[WriteOutcome],
        *,
        is_telling: bool,
    ) -> None:
        if written.cancelled():
            return
        error = written.exception()
        if error is None and written.result().state is WriteState.DONE:
            outcome = written.result()
            self.num_blocks += num_blocks
            self.num_bytes += outcome.num_bytes
            self._connected.add(peer)
            if is_telling and outcome.num_bytes >= MEASURED_BYTES:
                self._measure(outcome)
            on_end(None)
            return
        self.num_failed += 1
        self._connected.discard(peer)
        self._generation_by_peer.pop(peer, None)  # the next ask gets a fresh connection
        on_end(str(error) if error is not None else written.result().reason)

    def _measure(self, outcome: WriteOutcome) -> None:
        speed = outcome.num_bytes / max(outcome.seconds, 1e-9)
        before = speed if self.bytes_per_s is None else self.bytes_per_s
        self.bytes_per_s = before + _SMOOTHING * (speed - before)
