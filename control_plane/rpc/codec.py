"""Messages and hellos to frames and back.

A frame is bytes: protobuf defines the concatenation of two encodings as the encoding of their
merge, and merging repeated fields appends. So each message is encoded once, alone in a frame, when
it is sent, and the frame of a loop tick is the join of those bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from control_plane.rpc import dovetail_pb2, token_batch_codec
from control_plane.rpc.struct_codec import struct_codec
from core.messages import (
    AbortRequest,
    DrainWorker,
    FirstTokens,
    HandoffFailed,
    HandoffProgress,
    HandoffRefused,
    HandoffScored,
    HandoffSettled,
    MoveRequest,
    PathReport,
    PrefillAsk,
    PromptScored,
    RequestFailed,
    RequestMoved,
    RequestRefused,
    SettleHandoff,
    StartRequest,
    SwitchRole,
    TokenBatch,
    WorkerLoad,
)
from core.worker_record import Hello

Frame = dovetail_pb2.Frame

AnyMessage = (
    StartRequest
    | AbortRequest
    | TokenBatch
    | PromptScored
    | PathReport
    | RequestRefused
    | RequestFailed
    | WorkerLoad
    | PrefillAsk
    | SettleHandoff
    | HandoffProgress
    | HandoffScored
    | FirstTokens
    | HandoffRefused
    | HandoffFailed
    | HandoffSettled
    | MoveRequest
    | RequestMoved
    | DrainWorker
    | SwitchRole
)
"""Everything that a stream carries."""

HEARTBEAT = b""
"""The empty frame."""

_KIND_BY_STRUCT: dict[type[msgspec.Struct], str] = {
    StartRequest: "start_request",
    AbortRequest: "abort_request",
    TokenBatch: "token_batch",
    PromptScored: "prompt_scored",
    PathReport: "path_report",
    RequestRefused: "request_refused",
    RequestFailed: "request_failed",
    WorkerLoad: "worker_load",
    PrefillAsk: "prefill_ask",
    SettleHandoff: "settle_handoff",
    HandoffProgress: "handoff_progress",
    HandoffScored: "handoff_scored",
    FirstTokens: "first_tokens",
    HandoffRefused: "handoff_refused",
    HandoffFailed: "handoff_failed",
    HandoffSettled: "handoff_settled",
    MoveRequest: "move_request",
    RequestMoved: "request_moved",
    DrainWorker: "drain_worker",
    SwitchRole: "switch_role",
}
_TO_WIRE: dict[type[msgspec.Struct], tuple[str, Callable[[Any], dict[str, Any]]]] = {
    struct: (
        kind,
        token_batch_codec.encode if struct is TokenBatch else struct_codec(struct).encode,
    )
    for struct, kind in _KIND_BY_STRUCT.items()
}
_FROM_WIRE: dict[str, Callable[[Any], AnyMessage]] = {
    kind: token_batch_codec.decode if struct is TokenBatch else struct_codec(struct).decode
    for struct, kind in _KIND_BY_STRUCT.items()
}
_HELLO = struct_codec(Hello)


def encode(message: AnyMessage) -> bytes:
    """Return a frame with this message alone.

    Raises:
        ValueError, TypeError: a field outside of its wire type's range.
    """
    kind, to_wire = _TO_WIRE[type(message)]
    frame: dict[str, Any] = {"messages": [{kind: to_wire(message)}]}
    return Frame(**frame).SerializeToString()


def messages_of(frame: Frame) -> list[AnyMessage]:
    """Return a frame's messages in the order sent.

    Raises:
        ValueError: a message or an enum value that this protocol version does not know.
    """
    decoded: list[AnyMessage] = []
    for envelope in frame.messages:
        kind = envelope.WhichOneof("kind")
        if kind is None:
            msg = "a message of a kind that this protocol version does not know"
            raise ValueError(msg)
        decoded.append(_FROM_WIRE[kind](getattr(envelope, kind)))
    return decoded


def encode_hello(hello: Hello) -> bytes:
    """Return a stream's first frame."""
    fields: dict[str, Any] = {"hello": _HELLO.encode(hello)}
    return Frame(**fields).SerializeToString()


def hello_of(frame: Frame) -> Hello:
    """Return the hello of a stream's first frame.

    Raises:
        ValueError: it has none.
    """
    if not frame.HasField("hello"):
        msg = "the first frame carries no hello"
        raise ValueError(msg)
    return _HELLO.decode(frame.hello)


def encode_closing(reason: str) -> bytes:
    """Return a stream's last frame."""
    return Frame(closing=reason).SerializeToString()
