"""Posts an attempt's writes: ids to spans, one notification a write, peers learnt on demand.

    unknown -> learnt (region generation) -> a write FAILED: broken, or its process left
       ^                                            | no write to it is pending
       '------- removed from the transport ---------'

A broken peer is removed, for its connection stays in error whatever metadata is added to it; not
before its other writes ended, for removing it would fail them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from core.ids import Boot
from core.messages import PrefillAsk, RegionDescriptor, WriteNotification
from kv_transfer.descriptors import paired_spans, spans_of
from kv_transfer.handoff.prefill_messages import Push
from kv_transfer.transfer_driver import TransferDriver
from kv_transfer.transfer_thread import Tag, TransferOutcome
from kv_transfer.transport import PeerName, Poll, RemoteRegion, Span, TransferState, Transport
from kv_transfer.transports_seen import TransportsSeen

_RANK_PAIR = (0, 0)
_SMOOTHING = 0.2

MEASURED_BYTES = 1 << 20
"""Writes from this size on tell the fabric's speed: a small one takes as long as its latency, which
made a worker look a thousand times slower than it was, and routers avoid it for good."""

_log = logging.getLogger(__name__)

OnEnd = Callable[[Poll], None]
"""Called with how the write ended: DONE, FAILED, or REFUSED where it was not posted."""


def peer_name(worker_id: str, boot: Boot) -> PeerName:
    """Return the agent name of a worker's life."""
    return PeerName(f"{worker_id}@{boot}")


@dataclass(slots=True)
class _Peer:
    """What the present agent knows of a peer.

    Attributes:
        generation: of its region, as the agent learnt it; None before that.
        num_pending: writes to it that have not ended.
        is_connected: a write to it is DONE, and none failed since.
        is_broken: a write to it FAILED.
    """

    generation: int | None = None
    num_pending: int = 0
    is_connected: bool = False
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class _Posted:
    """One write under way.

    Attributes:
        is_telling: whether its time says how fast the fabric is.
    """

    peer_name: PeerName
    peer: _Peer
    num_blocks: int
    on_end: OnEnd
    is_telling: bool


class Pusher:
    """Writes blocks of this worker into blocks of decode workers.

    Args:
        on_transport: called when writes were seen to go over another transport than before.
    """

    def __init__(
        self,
        fabric: TransferDriver,
        boot: Boot,
        on_transport: Callable[[str], None] | None = None,
    ) -> None:
        self._fabric = fabric
        self._boot = boot
        self._peers: dict[PeerName, _Peer] = {}
        self._on_transport = on_transport
        self._transports = TransportsSeen()
        self._num_pending = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._held: list[tuple[PrefillAsk, Push, OnEnd]] | None = None
        self.num_blocks = 0
        self.num_bytes = 0
        self.num_failed = 0
        self.bytes_per_s: float | None = None

    @property
    def transport(self) -> str:
        """What writes went over, as far as the backend tells; empty before the first."""
        return self._transports.text

    def push(self, ask: PrefillAsk, push: Push, on_end: OnEnd) -> None:
        """Post one write; `on_end` is called on the loop, and nothing is posted twice."""
        if self._held is not None:
            self._held.append((ask, push, on_end))
            return
        region = ask.region
        peer = self._learn(region)
        remote = RemoteRegion(
            peer=peer_name(region.worker_id, region.boot),
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
            transport=self.transport,
        )
        payload: Tag = msgspec.msgpack.encode(tag)
        if ask.verify:
            payload = partial(_summed, tag, spans_of(push.sources, region.block_bytes))
        written = self._fabric.write(remote, local, target, payload)
        # Before it is connected, a write's time is that of connecting, too.
        posted = _Posted(remote.peer, peer, len(push.targets), on_end, is_telling=peer.is_connected)
        peer.num_pending += 1
        self._num_pending += 1
        self._quiet.clear()
        written.add_done_callback(partial(self._ended, posted))

    def forget(self, worker_id: str, boot: Boot) -> None:
        """Close the connection to a worker's life, to which no write is pending. The next write
        opens one anew."""
        name = peer_name(worker_id, boot)
        peer = self._peers.get(name)
        if peer is not None:
            assert not peer.num_pending, f"{name} is forgotten under a write"
            self._remove(name)

    def hold(self) -> None:
        """Post nothing until `resume`."""
        assert self._held is None, "held already"
        self._held = []

    def refuse_held(self, reason: str) -> None:
        """Give up what waits: it was not posted, and its attempts go on without this worker."""
        assert self._held is not None, "nothing is held"
        held, self._held = self._held, []
        for _, _, on_end in held:
            on_end(Poll(TransferState.REFUSED, reason))

    def resume(self) -> None:
        """Post what waited."""
        held, self._held = self._held or [], None
        for ask, push, on_end in held:
            self.push(ask, push, on_end)

    async def quiet(self) -> None:
        """Return once no write is under way."""
        await self._quiet.wait()

    async def renew(self, make: Callable[[], Transport]) -> None:
        """Destroy the agent and go on with a new one; writes pushed from now on are the new one's.

        Args:
            make: returns a transport that has the region registered; runs on the fabric's thread.
        """
        self._peers.clear()
        await self._fabric.renew(make)

    def _learn(self, region: RegionDescriptor) -> _Peer:
        """Add the peer, again when its region moved."""
        name = peer_name(region.worker_id, region.boot)
        peer = self._peers.setdefault(name, _Peer())
        if peer.generation != region.generation:
            peer.generation = region.generation
            added = self._fabric.call(lambda transport: transport.add_peer(name, region.metadata))
            added.add_done_callback(partial(self._added, name, peer))
        return peer

    def _added(self, name: PeerName, peer: _Peer, added: asyncio.Future[None]) -> None:
        error = None if added.cancelled() else added.exception()
        if error is not None:  # its writes are refused: "unknown peer"
            peer.generation = None
            _log.warning("the fabric does not take %s: %s", name, error)

    def _ended(self, posted: _Posted, written: asyncio.Future[TransferOutcome]) -> None:
        self._num_pending -= 1
        if not self._num_pending:
            self._quiet.set()
        if written.cancelled():
            return
        error = written.exception()
        if error is None:
            outcome = written.result()
            end = Poll(outcome.state, outcome.reason)
            if end.state is TransferState.DONE:
                self._count(posted, outcome)
        else:
            end = Poll(TransferState.REFUSED, str(error))
        posted.peer.num_pending -= 1
        if end.state is not TransferState.DONE:
            self.num_failed += 1
        if end.state is TransferState.FAILED:
            posted.peer.is_connected = False
            posted.peer.is_broken = True
        self._remove_if_broken(posted)
        posted.on_end(end)

    def _count(self, posted: _Posted, outcome: TransferOutcome) -> None:
        posted.peer.is_connected = not posted.peer.is_broken
        if self._transports.add(outcome.transport) and self._on_transport is not None:
            self._on_transport(self.transport)
        self.num_blocks += posted.num_blocks
        self.num_bytes += outcome.num_bytes
        if posted.is_telling and outcome.num_bytes >= MEASURED_BYTES:
            self._measure(outcome)

    def _remove_if_broken(self, posted: _Posted) -> None:
        """Have the next write connect anew; a peer of an agent that was destroyed is gone."""
        name, peer = posted.peer_name, posted.peer
        if peer.is_broken and not peer.num_pending and self._peers.get(name) is peer:
            self._remove(name)

    def _remove(self, name: PeerName) -> None:
        del self._peers[name]
        removed = self._fabric.call(lambda transport: transport.remove_peer(name))
        removed.add_done_callback(_forgive_a_stopped_fabric)

    def _measure(self, outcome: TransferOutcome) -> None:
        speed = outcome.num_bytes / max(outcome.seconds, 1e-9)
        before = speed if self.bytes_per_s is None else self.bytes_per_s
        self.bytes_per_s = before + _SMOOTHING * (speed - before)


def _summed(tag: WriteNotification, spans: Sequence[Span], transport: Transport) -> bytes:
    """Return the tag with the checksum of these bytes as they leave: block by block, in the order
    of the prompt."""
    summed = msgspec.structs.replace(tag, checksum=transport.checksum(spans))
    return msgspec.msgpack.encode(summed)


def _forgive_a_stopped_fabric(removed: asyncio.Future[None]) -> None:
    """It has closed all its connections; an exception that nobody looks at is logged."""
    if not removed.cancelled():
        removed.exception()
