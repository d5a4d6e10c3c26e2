"""Whether a peer's silence makes it suspect. Pure: the stream's timer asks, time is an argument.

TCP and gRPC keepalive do not see a SIGSTOPped peer, whose kernel still answers for it.
"""

from __future__ import annotations


class PeerWatch:
    """Hears a peer's frames and is asked every `heartbeat_s` whether they stopped.

    The longest time from the peer's last frame to `is_suspect` is suspect_s + heartbeat_s.
    """

    def __init__(self, *, heartbeat_s: float, suspect_s: float, now: float) -> None:
        self.is_suspect = False
        self._heartbeat_s = heartbeat_s
        self._suspect_s = suspect_s
        self._heard_at = now
        self._checked_at = now

    def heard(self, now: float) -> bool:
        """Note a frame of the peer; return whether this ended a suspicion."""
        self._heard_at = now
        was_suspect, self.is_suspect = self.is_suspect, False
        return was_suspect

    def check(self, now: float) -> bool:
        """Return whether the peer became suspect just now.

        A check that itself comes late means that we stood still, not the peer: its frames may lie
        unread in our socket, so the time that we missed does not count against it.
        """
        stood_still_s = now - self._checked_at - self._heartbeat_s
        if stood_still_s > self._heartbeat_s:
            self._heard_at += stood_still_s
        self._checked_at = now
        if self.is_suspect or now - self._heard_at <= self._suspect_s:
            return False
        self.is_suspect = True
        return True
