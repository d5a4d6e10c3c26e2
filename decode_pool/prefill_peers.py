"""Streams to prefill workers: opened when first needed, kept, opened anew after a loss.

    unknown -> connecting (messages wait) -> open <-> suspect -> closed: forgotten
                    '-> unreachable: the asks that waited were never sent

Whether an ask left this process decides whether its blocks can be written, so what waits for a
connection can still be taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from control_plane.rpc.interface import Stream, StreamListener
from core.errors import PeerError
from core.ids import Boot, HandoffId, WorkerId
from core.messages import PrefillAsk, PrefillCandidate, PrefillToDecode, SettleHandoff
from decode_pool.ports import Connect


@dataclass(slots=True)
class _Peer:
    stream: Stream[Any] | None = None
    waiting: list[PrefillAsk] = field(default_factory=list)
    is_suspect: bool = False


class PrefillPeers:
    """Peers by boot. Lives in the worker's task.

    Args:
        listener: hears what the streams bring; must call `opened`, `suspected` and `closed`.
        on_unreachable: called in the connecting task with the boot and the reason.
    """

    def __init__(
        self,
        connect: Connect,
        listener: StreamListener[PrefillToDecode],
        group: asyncio.TaskGroup,
        on_unreachable: Callable[[Boot, str], None],
    ) -> None:
        self._connect = connect
        self._listener = listener
        self._group = group
        self._on_unreachable = on_unreachable
        self._peers: dict[Boot, _Peer] = {}

    def ask(self, candidate: PrefillCandidate, ask: PrefillAsk) -> str | None:
        """Send an ask, now or when connected. Returns why it never will be, None if it may."""
        peer = self._peers.get(candidate.boot)
        if peer is None:
            peer = self._peers[candidate.boot] = _Peer()
            self._group.create_task(self._open(candidate))
        if peer.is_suspect:
            return f"{candidate.worker_id} does not answer"
        if peer.stream is None:
            peer.waiting.append(ask)
        else:
            peer.stream.send(ask)
        return None

    def settle(self, boot: Boot, handoff: HandoffId) -> bool:
        """Ask a peer to settle, if it can be reached. Returns True if its ask never left here."""
        peer = self._peers.get(boot)
        if peer is None:
            return False
        kept = [ask for ask in peer.waiting if ask.handoff != handoff]
        was_waiting = len(kept) < len(peer.waiting)
        peer.waiting = kept
        if peer.stream is not None:
            peer.stream.send(SettleHandoff(handoff))
        return was_waiting

    def opened(self, stream: Stream[Any]) -> None:
        """A stream is open: send what waited for it."""
        peer = self._peers.setdefault(stream.peer.boot, _Peer())
        peer.stream = stream
        waiting, peer.waiting = peer.waiting, []
        for ask in waiting:
            stream.send(ask)

    def suspected(self, stream: Stream[Any], *, suspect: bool) -> None:
        """Heartbeats stopped, or came back."""
        peer = self._peers.get(stream.peer.boot)
        if peer is not None and peer.stream is stream:
            peer.is_suspect = suspect

    def closed(self, stream: Stream[Any]) -> bool:
        """A stream is gone. Returns whether it was the peer's current one."""
        peer = self._peers.get(stream.peer.boot)
        if peer is None or peer.stream is not stream:
            return False
        del self._peers[stream.peer.boot]
        return True

    def unreachable(self, boot: Boot) -> list[HandoffId]:
        """Connecting failed. Returns the attempts whose asks never left."""
        peer = self._peers.pop(boot, None)
        return [] if peer is None else [ask.handoff for ask in peer.waiting]

    def is_replaced(self, worker_id: WorkerId, boot: Boot) -> bool:
        """Return whether a boot has no stream while another boot of the same worker has one."""
        streams = (peer.stream for peer in self._peers.values())
        reached = {stream.peer.name for stream in streams if stream is not None}
        return boot not in self._peers and worker_id in reached

    def close(self) -> None:
        """Close every stream; prefill workers settle what was asked on it."""
        for peer in self._peers.values():
            if peer.stream is not None:
                peer.stream.close("the decode worker stops")

    async def _open(self, candidate: PrefillCandidate) -> None:
        try:
            await self._connect(candidate, self._listener)
        except PeerError as error:
            self._on_unreachable(candidate.boot, f"{candidate.worker_id}: {error}")
