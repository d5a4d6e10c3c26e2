"""What a worker's writes were seen to go over, over all peers and the lives of its agent."""

from __future__ import annotations


class TransportsSeen:
    """Grows only: a backend tells less after a small write ("ucx") than after a large one ("ucx
    (cma)"), and peers differ; whoever registers the text must not write it again and again.

    Attributes:
        text: for people; empty before anything was seen.
    """

    def __init__(self) -> None:
        self.text = ""
        self._seen: set[str] = set()

    def add(self, transport: str) -> bool:
        """Take `Health.transport` as it is after a write; return whether `text` changed by it."""
        if any(known.startswith(transport) for known in self._seen):
            return False
        self._seen = {known for known in self._seen if not transport.startswith(known)}
        self._seen.add(transport)
        self.text = " + ".join(sorted(self._seen))
        return True
