"""What can keep a request from finishing, and the error that the client gets for it."""

from __future__ import annotations

import enum

from core.errors import RequestError


class Trouble(enum.Enum):
    """Kinds of trouble."""

    NO_WORKER = "no_worker"
    NO_PREFILL = "no_prefill_worker"
    REFUSED = "overloaded"
    LOST = "worker_lost"
    FAILED = "generation_failed"
    TIMEOUT = "request_timeout"
    TOO_LONG = "context_length_exceeded"
    INVALID = "invalid_token_id"
    STOPPING = "shutting_down"


_STATUS = {Trouble.REFUSED: 429, Trouble.FAILED: 500, Trouble.TOO_LONG: 400, Trouble.INVALID: 400}

_MESSAGE = {
    Trouble.NO_WORKER: "no worker can serve requests now; try again soon",
    Trouble.NO_PREFILL: "no prefill worker can be asked now, and this request may not be computed "
    "on a decode worker; try again soon",
    Trouble.REFUSED: "all workers refuse new requests because they are full; try again soon",
    Trouble.LOST: "the request's worker was lost and no other could go on in time; try again soon",
    Trouble.FAILED: "the generation failed",
    Trouble.TIMEOUT: "the request ran out of its time (router.request_timeout_s); send fewer "
    "tokens or raise the limit",
    Trouble.TOO_LONG: "the prompt does not fit into the KV memory or context of any worker; "
    "shorten it",
    Trouble.INVALID: "the model does not know a token id of the prompt",
    Trouble.STOPPING: "this router shuts down; try again soon",
}

_RETRY_AFTER_S = {
    Trouble.NO_WORKER: 5.0,
    Trouble.NO_PREFILL: 5.0,
    Trouble.REFUSED: 1.0,
    Trouble.LOST: 1.0,
    Trouble.TIMEOUT: 1.0,
    Trouble.STOPPING: 5.0,
}


def error_of(trouble: Trouble, message: str) -> RequestError:
    """Return the client's error; `message` is a worker's own words about it, or empty."""
    text = _MESSAGE[trouble]
    return RequestError(
        f"{text}: {message}" if message else text,
        status=_STATUS.get(trouble, 503),
        code=trouble.value,
        retry_after_s=_RETRY_AFTER_S.get(trouble),
    )
