"""Tokens on their way to routers: all of one engine step on one stream leave in one message."""

from __future__ import annotations

from typing import Any

from control_plane.rpc.interface import Stream
from core.messages import TokenBatch, WorkerToRouter
from core.request import TokenUpdate


class TokenOutbox:
    """Updates by stream until `flush`."""

    def __init__(self) -> None:
        self._updates: dict[Stream[Any], list[TokenUpdate]] = {}

    def add(self, stream: Stream[Any], update: TokenUpdate) -> None:
        """Send an update with the next flush."""
        self._updates.setdefault(stream, []).append(update)

    def send(self, stream: Stream[Any], message: WorkerToRouter) -> None:
        """Send a message at once, after the tokens that wait for its stream."""
        updates = self._updates.pop(stream, None)
        if updates:
            stream.send(TokenBatch(tuple(updates)))
        stream.send(message)

    def flush(self) -> None:
        """Send everything."""
        updates_by_stream, self._updates = self._updates, {}
        for stream, updates in updates_by_stream.items():
            stream.send(TokenBatch(tuple(updates)))
