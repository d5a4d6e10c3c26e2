"""Names of workers, their lives, requests and the attempts at a request's handoff."""

from __future__ import annotations

import secrets
from typing import NewType, Self

import msgspec

WorkerId = NewType("WorkerId", str)
"""Stable over restarts, chosen by the operator or the launcher (``prefill-0``)."""

Boot = NewType("Boot", str)
"""One life of a process: 128 random bits as 32 hex digits. Every address and message carries it."""

RequestId = NewType("RequestId", str)
"""The router's name of a request, never used twice: ``<x-request-id>~<router's life>.<count>``.

Clients repeat their ids (a retry, a restarted router's client), so a worker that went by them would
take what is late of one request for another's. See `client_id_of` for what people search for.
"""

CLIENT_ID_END = "~"
"""Ends the client's part of a `RequestId`; `x-request-id` (1 to 128 characters of
``[A-Za-z0-9._-]``) never contains it."""

BlockId = NewType("BlockId", int)
"""Index of a block in one rank's pool, from 0."""

SlotId = NewType("SlotId", int)
"""Index of a sequence's row in the executor's running batch, from 0."""


def client_id_of(request_id: str) -> str:
    """Return the ``x-request-id`` in a request's name, or in a name made of it (an attempt's)."""
    return request_id.partition(CLIENT_ID_END)[0]


def new_boot() -> Boot:
    """Return a fresh boot; call once in the life of a process (or of a simulated one)."""
    return Boot(secrets.token_hex(16))


class Attempt(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Which try at a request: the router counts dispatches, the decode worker its tries within
    one."""

    dispatch: int
    trial: int

    def next_trial(self) -> Self:
        """Return the decode worker's next try within the same dispatch."""
        return type(self)(self.dispatch, self.trial + 1)


class HandoffId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names the move of one request's KV in one attempt; never reused."""

    request_id: RequestId
    attempt: Attempt

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt.dispatch}.{self.attempt.trial}"
