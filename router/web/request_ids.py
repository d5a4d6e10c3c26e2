"""Names of requests: the client's where it is safe to log, else ours; and those for the workers."""

from __future__ import annotations

import itertools
import re
import secrets

from core.ids import CLIENT_ID_END, RequestId
from router.entropy import Entropy

_SAFE = re.compile(r"[A-Za-z0-9._-]{1,128}")


def accept_or_make(given: str | None, entropy: Entropy) -> str:
    """Return the header's id if it is 1 to 128 characters of `[A-Za-z0-9._-]`, else a new one."""
    if given is not None and _SAFE.fullmatch(given):
        return given
    return entropy.take(16).hex()


class RequestNames:
    """Names that no request of any router ever had: the client's id, this life, a count.

    Args:
        life: of this router process; 64 random bits as 16 hex digits where none is given.
    """

    def __init__(self, life: str | None = None) -> None:
        self._life = life or secrets.token_hex(8)
        self._counter = itertools.count(1)

    def new(self, client_id: str) -> RequestId:
        """Return the next name under a client's id."""
        return RequestId(f"{client_id}{CLIENT_ID_END}{self._life}.{next(self._counter)}")
