"""A transport as the pools see it: `kv_transfer.transfer_thread` runs one on a thread of its own, a
simulation on its one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kv_transfer.transfer_thread import Tag, TransferOutcome
from kv_transfer.transport import RemoteRegion, Span, Transport

T = TypeVar("T")


class TransferDriver(Protocol):
    """Carries calls to a transport, one after another, and its notifications to the loop. All
    methods are called on the loop's thread; see `TransferThread` for what they promise."""

    def call(self, function: Callable[[Transport], T]) -> asyncio.Future[T]:
        """Run `function(transport)`, in the order of calls."""
        ...

    def write(
        self, remote: RemoteRegion, local: Sequence[Span], target: Sequence[Span], tag: Tag
    ) -> asyncio.Future[TransferOutcome]:
        """Post a write; the future resolves with its end."""
        ...

    def watch(self) -> None:
        """An inbound handoff opened: poll for notifications. Balanced by `unwatch`."""
        ...

    def unwatch(self) -> None:
        """An inbound handoff ended."""
        ...

    async def renew(self, make: Callable[[], Transport]) -> None:
        """Destroy the transport and go on with a new one; pending writes end as FAILED."""
        ...
