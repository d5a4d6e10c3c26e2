"""The two ends of one grpc.aio call as `Wire`s, and gRPC's errors as `ConnectionError`.

The method's frames are bytes to gRPC, so it is named here and not taken from stubs: going out they
are spliced (see `codec`), and of bytes that are no frame gRPC would log a traceback, no more.
All that the stubs of grpcio leave untyped is behind `_aio` and `_grpc`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from control_plane.rpc import codec

StreamCall = grpc.aio.StreamStreamCall[bytes, bytes]
ServerContext = grpc.aio.ServicerContext[bytes, bytes]

MAX_FRAME_BYTES = 128 << 20
"""gRPC's bound on one frame, both ways. A prompt of 128k tokens takes 0.4 MB."""

_SERVICE = "dovetail.v1.Streams"
_METHOD = "Connect"
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.enable_http_proxy", 0),
)
_grpc: Any = grpc
_aio: Any = grpc.aio


def new_channel(address: str) -> grpc.aio.Channel:
    """Return a channel with a connection of its own.

    It shares neither fate nor flow control with another stream, and a restarted peer is tried at
    once, whatever back-off an earlier channel was in.
    """
    return grpc.aio.insecure_channel(
        address, options=[*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    )


def open_call(channel: grpc.aio.Channel) -> StreamCall:
    """Start the one method."""
    untyped: Any = channel
    return untyped.stream_stream(f"/{_SERVICE}/{_METHOD}")()


def new_server(method: Callable[[object, ServerContext], Awaitable[None]]) -> grpc.aio.Server:
    """Return a server, not started, of the one method."""
    # Without reuse of ports, a second worker on one port fails instead of getting half of the calls
    server = _aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", 0)])
    connect = _grpc.stream_stream_rpc_method_handler(method)
    server.add_generic_rpc_handlers(
        (_grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: connect}),)
    )
    return server


class ClientWire:
    """The opener's end."""

    def __init__(self, call: StreamCall) -> None:
        self._call = call

    async def read(self) -> codec.Frame | None:
        """Return the next frame, None at the peer's orderly end.

        Raises:
            ConnectionError: the connection is lost.
            ValueError: what came is no frame.
        """
        try:
            data: Any = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(error.details() or error.code().name) from error
        return None if data is _aio.EOF else _frame_of(data)

    async def write(self, data: bytes) -> None:
        """Hand one frame to gRPC.

        Raises:
            ConnectionError: the connection is lost.
        """
        try:
            await self._call.write(data)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(error.details() or error.code().name) from error
        except asyncio.InvalidStateError as error:
            msg = "the call has ended"
            raise ConnectionError(msg) from error


class ServerWire:
    """The answerer's end. A lost peer cancels the method's task, which is grpc.aio's way."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def read(self) -> codec.Frame | None:
        """Return the next frame, None once the opener writes no more.

        Raises:
            ValueError: what came is no frame.
        """
        data: Any = await self._context.read()
        return None if data is _aio.EOF else _frame_of(data)

    async def write(self, data: bytes) -> None:
        """Hand one frame to gRPC.

        Raises:
            ConnectionError: the connection is lost.
        """
        try:
            await self._context.write(data)
        except grpc.aio.BaseError as error:
            raise ConnectionError(str(error)) from error


def _frame_of(data: bytes) -> codec.Frame:
    try:
        return codec.Frame.FromString(data)
    except DecodeError as error:
        raise ValueError(str(error)) from error
