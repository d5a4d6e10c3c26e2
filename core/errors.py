"""The exception tree, drawn once. A failure inside a protocol is a state transition, not one of
these.

DovetailError
  UsageError              the user's slip: bad flag, bad config; the CLI prints one line, exits
  with 2
    ConfigError           names section.key, the value, and what would be right
    ModelError            a model directory or file that cannot be served, and why
  RequestError            a client's slip or a refusal: becomes api.md's error object with its
  status
  PeerError               another process of the cluster
    PeerUnavailable       not reachable, suspect, or gone
    ProtocolMismatch      handshake refused: names the difference
  FabricError             a transfer failed
  ControlPlaneError       etcd did not answer in time, or refused
"""

from __future__ import annotations


class DovetailError(Exception):
    """Root of everything that Dovetail raises on purpose."""


class UsageError(DovetailError):
    """A user's slip on the command line: one line on stderr, exit code 2."""


class ConfigError(UsageError):
    """A configuration value that cannot be used."""


class ModelError(UsageError):
    """A model that cannot be loaded or served."""


class RequestError(DovetailError):
    """A refusal that the client sees, in the OpenAI error shape.

    Attributes:
        status: HTTP status, 4xx or 5xx.
        message: names the field, the value and what would be right.
        type: OpenAI's error type, such as ``invalid_request_error``.
        param: the field, or None.
        code: a stable machine-readable code, or None.
        retry_after_s: seconds for the ``Retry-After`` header (429 and 503 only).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = _ERROR_TYPE_BY_STATUS.get(
            status, "server_error" if status >= 500 else "invalid_request_error"
        )
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


_ERROR_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


class PeerError(DovetailError):
    """Trouble with another process of the cluster."""


class PeerUnavailable(PeerError):  # noqa: N818 - reads as a state, as in grpc's UNAVAILABLE
    """The peer is not reachable, suspect or gone."""


class ProtocolMismatch(PeerError):  # noqa: N818
    """The peer speaks another protocol version, model or layout; the message names the
    difference."""


class FabricError(DovetailError):
    """A KV transfer failed."""


class ControlPlaneError(DovetailError):
    """etcd did not answer within its deadline, or refused."""
