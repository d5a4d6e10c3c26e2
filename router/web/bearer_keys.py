"""Keys that a request may carry: `authorization: Bearer KEY`."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from router.web.asgi import Scope, header


class BearerKeys:
    """Those of one list; false where it is empty."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def has(self, scope: Scope) -> bool:
        """Whether a request carries one of them."""
        kind, _, key = (header(scope, b"authorization") or "").partition(" ")
        given = key.strip().encode("latin-1")
        # Compared with all keys, so that the time says nothing about which one was near.
        matches = [hmac.compare_digest(given, accepted) for accepted in self._keys]
        return kind.lower() == "bearer" and any(matches)
