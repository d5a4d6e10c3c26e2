"""Names of requests: the client's where it is safe to log, else ours; unique among live ones."""

from __future__ import annotations

import itertools
import re
import secrets

from core.ids import RequestId

_SAFE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_LENGTH = 128


def accept_or_make(given: str | None) -> str:
    """Return the header's id if it is 1 to 128 characters of `[A-Za-z0-9._-]`, else a new one."""
    if given is not None and _SAFE.fullmatch(given):
        return given
    return secrets.token_hex(16)


class LiveIds:
    """The ids in use.

    Clients repeat ids (a retry, a test that always sends one); workers must never see two live
    requests of one name. A name that is taken gets a counter, so that a search for it finds both.
    """

    def __init__(self) -> None:
        self._live: set[str] = set()
        self._counter = itertools.count(1)

    def take(self, wanted: str) -> RequestId:
        """Return `wanted`, or a variant of it that is free; `release` it at the end."""
        name = wanted
        while name in self._live:
            suffix = f".{next(self._counter)}"
            name = wanted[: _MAX_LENGTH - len(suffix)] + suffix
        self._live.add(name)
        return RequestId(name)

    def release(self, name: RequestId) -> None:
        """Give a name back."""
        self._live.discard(name)
