"""The last requests that ended here, so that what comes late for them means nothing: their workers
were told when they ended."""

from __future__ import annotations

from collections import OrderedDict

from core.ids import RequestId

_MAX_REQUESTS = 4096


class RecentRequests:
    """Names of requests; the oldest go first."""

    def __init__(self) -> None:
        self._ids: OrderedDict[RequestId, None] = OrderedDict()

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether it ended a moment ago."""
        return request_id in self._ids

    def remember(self, request_id: RequestId) -> None:
        """A request ended, or its worker was told to abort it."""
        self._ids[request_id] = None
        self._ids.move_to_end(request_id)
        if len(self._ids) > _MAX_REQUESTS:
            self._ids.popitem(last=False)
