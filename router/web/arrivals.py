"""The streams of one HTTP request's prompts, read as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from core.request import TokenUpdate
from router.dispatch.interface import TokenStream

Arrival = tuple[int, Sequence[TokenUpdate] | None]
"""(prompt index, its updates that came together, None at its end)."""


class Arrivals(Protocol):
    """What comes from all streams."""

    async def take(self) -> Arrival:
        """Return the next; nothing comes after the end of every stream.

        Raises:
            RequestError: a prompt cannot be finished.
        """
        ...

    def close(self) -> None:
        """Stop reading; idempotent."""
        ...


def arrivals_of(streams: Sequence[TokenStream]) -> Arrivals:
    """Return the cheapest way to read so many."""
    return _FromOne(streams[0]) if len(streams) == 1 else _FromSeveral(streams)


class _FromOne:
    """Nearly every request: nothing stands between its task and the stream."""

    __slots__ = ("_updates",)

    def __init__(self, stream: TokenStream) -> None:
        self._updates = aiter(stream)

    async def take(self) -> Arrival:
        try:
            return 0, await self._updates.__anext__()
        except StopAsyncIteration:
            return 0, None

    def close(self) -> None:
        """There is nothing to stop."""


class _FromSeveral:
    """A task a prompt reads its stream into one queue; its end, or its error, comes last.

    The queue is short: what a slow client has not taken waits in the streams, compactly.
    """

    __slots__ = ("_queue", "_readers")

    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self._queue: asyncio.Queue[Arrival | Exception] = asyncio.Queue(maxsize=1)
        self._readers = [
            asyncio.create_task(self._read(at, stream)) for at, stream in enumerate(streams)
        ]

    async def take(self) -> Arrival:
        arrival = await self._queue.get()
        if isinstance(arrival, Exception):
            raise arrival
        return arrival

    def close(self) -> None:
        for reader in self._readers:
            reader.cancel()

    async def _read(self, prompt_index: int, stream: TokenStream) -> None:
        try:
            async for updates in stream:
                await self._queue.put((prompt_index, updates))
        except Exception as error:  # noqa: BLE001 - raised again where the queue is read
            await self._queue.put(error)
        else:
            await self._queue.put((prompt_index, None))
