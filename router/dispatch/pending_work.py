"""Work sent to a worker that its last load report cannot show yet.

Loads come with each heartbeat; between two of them a burst would all go to whoever looked idle. So
what was sent counts until a load came that was surely made after it arrived, or its first token
did.
"""

from __future__ import annotations

from core.ids import RequestId

SURELY_ARRIVED_S = 0.25
"""A load that comes so long after a request was sent has counted it: two hops (the ask goes on to a
prefill worker) and the reservation before it."""


class PendingWork:
    """Requests and their uncached prompt tokens, by request."""

    __slots__ = ("_sent", "num_tokens")

    def __init__(self) -> None:
        self._sent: dict[RequestId, tuple[float, int]] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._sent)

    def add(self, request_id: RequestId, num_tokens: int, now: float) -> None:
        """Count a request that was sent now."""
        self.discard(request_id)
        self._sent[request_id] = (now, num_tokens)
        self.num_tokens += num_tokens

    def discard(self, request_id: RequestId) -> None:
        """Its work is done, or went elsewhere; an unknown id is ignored."""
        entry = self._sent.pop(request_id, None)
        if entry is not None:
            self.num_tokens -= entry[1]

    def load_came(self, now: float) -> None:
        """The worker told its load: what it must have counted by then is no longer pending."""
        for request_id, (sent_at, _) in list(self._sent.items()):
            if now - sent_at < SURELY_ARRIVED_S:
                break  # in the order sent
            self.discard(request_id)

    def clear(self) -> None:
        """The stream is gone, and all work with it."""
        self._sent.clear()
        self.num_tokens = 0
