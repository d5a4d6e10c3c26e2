"""Whether a peer's silence makes it suspect. Pure: the stream's timer asks, time is an argument.

TCP and gRPC keepalive do not see a SIGSTOPped peer, whose kernel still answers for it.
"""

from __future__ import annotations


class PeerWatch:
    """Hears a peer's frames, says when to look whether they stopped, and is asked then.

        last frame --suspect_s of silence--> doubt --heartbeat_s more--> suspect

    So the time from the peer's last frame to `is_suspect` is suspect_s + heartbeat_s, and a peer
    that talks costs one look in suspect_s.
    """

    def __init__(self, *, heartbeat_s: float, suspect_s: float, now: float) -> None:
        self.is_suspect = False
        self.look_at = now + suspect_s
        """When to `check` next."""
        self._heartbeat_s = heartbeat_s
        self._suspect_s = suspect_s
        self._heard_at = now
        self._doubts = False

    def heard(self, now: float) -> bool:
        """Note a frame of the peer; return whether this ended a suspicion."""
        self._heard_at = now
        self._doubts = False
        was_suspect, self.is_suspect = self.is_suspect, False
        return was_suspect

    def check(self, now: float) -> bool:
        """Return whether the peer became suspect just now.

        A check that itself comes late means that we stood still, not the peer: its frames may lie
        unread in our socket, so the time that we missed does not count against it, and between
        doubt and suspicion there is always time to read.
        """
        stood_still_s = now - self.look_at
        if stood_still_s > self._heartbeat_s:
            self._heard_at = min(now, self._heard_at + stood_still_s)
        is_silent = now >= self._heard_at + self._suspect_s
        if is_silent and not self._doubts and not self.is_suspect:
            self._doubts = True
            self.look_at = now + self._heartbeat_s
            return False
        became_suspect = is_silent and self._doubts
        self._doubts = False
        self.is_suspect |= became_suspect
        self.look_at = (now if self.is_suspect else self._heard_at) + self._suspect_s
        return became_suspect
