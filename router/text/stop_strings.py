"""Finds the first stop string in text that arrives in pieces.

Text is held back only as far as it could still be the beginning of a stop string: the longest
suffix of what was not released that is a proper prefix of one. So a match is found wherever the
borders between tokens lie, and no character of a match ever leaves.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One sample's search.

    Attributes:
        matched: the stop string that was found, None before.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        """Args: stops: none of them empty; include_in_output: release the stop string too."""
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take the next piece; return what can be released. After a match nothing comes any more.

        Where several stop strings match, the one that is complete first counts, and of those the
        one that begins first.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        end, stop = self._first_match(pending)
        if stop is not None:
            self.matched, self._held = stop, ""
            return pending[: end if self._include else end - len(stop)]
        held = self._possible_prefix(pending)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]

    def flush(self) -> str:
        """The sample ended otherwise: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str | None]:
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return 0, None
        end, _, stop = min(found)
        return end, stop

    def _possible_prefix(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a proper prefix of a stop."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
