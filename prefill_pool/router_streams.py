"""The routers' streams to a prefill worker: they carry its load, and requests only by mistake."""

from __future__ import annotations

import logging
from typing import Any

from control_plane.rpc.interface import Stream
from control_plane.rpc.load_reports import LoadReports
from core.messages import RequestRefused, RouterToWorker, StartRequest

_log = logging.getLogger(__name__)


class RouterStreams:
    """`StreamListener[RouterToWorker]` of a worker whose role serves no whole request.

    Args:
        reports: of its load; learns of each stream.
    """

    def __init__(self, reports: LoadReports) -> None:
        self._reports = reports

    def on_open(self, stream: Stream[Any]) -> None:
        """A router connected: it learns the load at once."""
        self._reports.opened(stream)

    def on_message(self, stream: Stream[Any], message: RouterToWorker) -> None:
        """Refuse a request that a router with an old view sent here."""
        if isinstance(message, StartRequest):
            refused = RequestRefused(
                message.request.request_id,
                message.dispatch,
                "wrong_role",
                "this worker computes prompts only",
            )
            stream.send(refused)

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        """Nothing here depends on a router."""

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        """A router left."""
        _log.info("router %s left: %s", stream.peer.name, reason)
        self._reports.closed(stream)
