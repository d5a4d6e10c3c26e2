"""The last requests that ended here, so that what comes late for them means nothing.

A client may use an id again at once (a retry with the same `x-request-id`), while tokens of the
request before are still on their way under the same id. So dispatch numbers of one id never start
again from 1: those late tokens carry a lower number and are dropped.
"""

from __future__ import annotations

from collections import OrderedDict

from core.ids import RequestId

_MAX_REQUESTS = 4096


class RecentRequests:
    """Last dispatch numbers by request id; the oldest go first."""

    def __init__(self) -> None:
        self._number_by_id: OrderedDict[RequestId, int] = OrderedDict()

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether it ended a moment ago; then its workers were told."""
        return request_id in self._number_by_id

    def last_number(self, request_id: RequestId) -> int:
        """Return the last dispatch number used under this id, 0 for none."""
        return self._number_by_id.get(request_id, 0)

    def remember(self, request_id: RequestId, number: int) -> None:
        """An id ended, or was told to be aborted, at this dispatch number."""
        self._number_by_id[request_id] = max(number, self.last_number(request_id))
        self._number_by_id.move_to_end(request_id)
        if len(self._number_by_id) > _MAX_REQUESTS:
            self._number_by_id.popitem(last=False)
