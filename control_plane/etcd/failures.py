"""What a failed call to etcd means, from gRPC's code and etcd's words."""

from __future__ import annotations

import enum

import grpc
import grpc.aio
from etcd3aio import EtcdError

FAILURES = (TimeoutError, EtcdError, grpc.aio.AioRpcError, grpc.aio.UsageError)
"""All that a call raises."""


class Failure(enum.Enum):
    """What to make of it."""

    OUTAGE = "no answer that says anything"
    REFUSAL = "etcd is there and said no to this call, or we have closed"
    NO_SPACE = "etcd's quota is reached: it answers, but takes no writes"
    STALE_TOKEN = "our token expired, or etcd's users changed: authenticate again"  # noqa: S105
    BAD_USER = "not this user, or not without one"
    NO_PERMISSION = "the user's roles do not allow it"
    BAD_CERTIFICATE = "one side does not take the other's certificate"


_BY_CODE = {
    grpc.StatusCode.NOT_FOUND: Failure.REFUSAL,  # a lease that is gone
    grpc.StatusCode.OUT_OF_RANGE: Failure.REFUSAL,
    grpc.StatusCode.INVALID_ARGUMENT: Failure.REFUSAL,
    grpc.StatusCode.FAILED_PRECONDITION: Failure.REFUSAL,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Failure.NO_SPACE,
    grpc.StatusCode.UNAUTHENTICATED: Failure.STALE_TOKEN,
    grpc.StatusCode.PERMISSION_DENIED: Failure.NO_PERMISSION,
}

# etcd's words (api/v3rpc/rpctypes) and BoringSSL's, where a code alone says too little.
_BY_WORDS = {
    "user name is empty": Failure.BAD_USER,
    "authentication failed, invalid user ID or password": Failure.BAD_USER,
    "revision of auth store is old": Failure.STALE_TOKEN,
    "revision in header is old": Failure.STALE_TOKEN,  # the same, where it was not translated
    "too many requests": Failure.OUTAGE,  # also RESOURCE_EXHAUSTED
    "CERTIFICATE": Failure.BAD_CERTIFICATE,  # CERTIFICATE_VERIFY_FAILED, ..._ALERT_BAD_CERTIFICATE
    "Hostname Verification Check failed": Failure.BAD_CERTIFICATE,
}


def classify(error: BaseException) -> Failure:
    """Return what one of `FAILURES` means."""
    if isinstance(error, grpc.aio.UsageError):
        return Failure.REFUSAL
    rpc_error = _rpc_error(error)
    if rpc_error is None:
        return Failure.OUTAGE
    words = rpc_error.details() or ""
    for part, failure in _BY_WORDS.items():
        if part in words:
            return failure
    return _BY_CODE.get(rpc_error.code(), Failure.OUTAGE)


def describe(error: BaseException) -> str:
    """Return it in words, on one line."""
    rpc_error = _rpc_error(error)
    if rpc_error is not None:
        return rpc_error.details() or rpc_error.code().name
    return str(error) or "no answer within the deadline"


def _rpc_error(error: BaseException) -> grpc.aio.AioRpcError | None:
    """Return gRPC's error, which etcd3aio wraps in some of its own."""
    for found in (error, error.__cause__):
        if isinstance(found, grpc.aio.AioRpcError):
            return found
    return None
