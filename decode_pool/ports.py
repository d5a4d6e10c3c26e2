"""What a decode worker is wired to; the composition root makes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from control_plane.rpc.interface import Stream, StreamListener
from core.ids import RequestId
from core.memory_region import MemoryRegion
from core.messages import DecodeToPrefill, PrefillCandidate, PrefillToDecode
from engine.engine_driver import EngineDriver
from engine.events import CacheChanged
from kv_transfer.transfer_driver import TransferDriver


class FenceableRegion(MemoryRegion, Protocol):
    """A region that can be moved away from under late writes, see `kv_transfer.region`."""

    def fence(self) -> int:
        """Move the region, keeping its bytes; returns the new generation."""
        ...

    def release_sinks(self) -> None:
        """Unmap the addresses that it had before."""
        ...


Connect = Callable[
    [PrefillCandidate, StreamListener[PrefillToDecode]],
    Awaitable[Stream[DecodeToPrefill]],
]
"""Open a stream to a prefill worker's boot; raises `core.errors.PeerError`. The stream's
`peer.boot` is the candidate's, and `on_open` is called before it returns."""


@dataclass(frozen=True, slots=True)
class DecodePorts:
    """Started before `DecodeWorker.run`, stopped after it by whoever made them.

    Attributes:
        engine: its `on_events` brings all events to `DecodeWorker.on_engine_events`, its
            `on_failure` is `DecodeWorker.on_failure`. A prefill pool may be on the same one.
        fabric: its transport has `region` registered; its `on_notification` is
            `DecodeWorker.on_notification`, its `on_failure` `DecodeWorker.on_failure`.
        on_cache_changed: the cache ledger's writer.
        on_preempted: records a preempted request in the control plane.
        on_resumed: it runs again, or is over.
        on_transport: hears what its peers' writes come over ("ucx (cma)") when they tell.
        on_moved: a request was stopped here with its KV in the cache, and its next worker may ask
            for that.
        without_writes: entered while the region moves: a write that read it then would send zeros.
    """

    engine: EngineDriver
    fabric: TransferDriver
    region: FenceableRegion
    connect: Connect
    on_cache_changed: Callable[[CacheChanged], None]
    on_preempted: Callable[[RequestId], None]
    on_resumed: Callable[[RequestId], None]
    on_transport: Callable[[str], None] | None = None
    on_moved: Callable[[RequestId], None] | None = None
    without_writes: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
