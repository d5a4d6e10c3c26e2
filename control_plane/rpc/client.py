"""Opens a stream to a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc
import grpc.aio

from control_plane.rpc import codec
from control_plane.rpc.grpc_wire import ClientWire, StreamCall, new_channel, open_call
from control_plane.rpc.handshake import NO_HELLO, difference
from control_plane.rpc.interface import Stream, StreamListener
from control_plane.rpc.refusals import PeersRefused
from control_plane.rpc.stream_end import StreamEnd
from core.clock import Clock
from core.config import ControlPlaneConfig
from core.errors import PeerUnavailable, ProtocolMismatch
from core.worker_record import Hello

CONNECT_S = 5.0
"""Connection and handshake together: a frozen worker accepts and never answers."""

_END_S = 1.0
"""How long the worker may take to confirm an orderly end."""

_log = logging.getLogger(__name__)

_serving: set[asyncio.Task[None]] = set()
"""asyncio itself holds its tasks weakly."""

_MAX_REFUSALS = 1024

_refusals: dict[tuple[str, str], None] = {}
"""(address, reason) of those warned about, oldest first: who was refused tries again for ever."""


async def connect(
    address: str,
    hello: Hello,
    listener: StreamListener[Any],
    *,
    config: ControlPlaneConfig,
    clock: Clock,
    refused: PeersRefused | None = None,
) -> Stream[Any]:
    """Open a stream; `listener.on_open` has been called when this returns.

    Args:
        address: host:port of the worker's gRPC server.
        hello: ours; `expected_boot` names the life of the worker that we mean.
        refused: counts the handshakes that come to nothing.

    Raises:
        PeerUnavailable: no connection, or no answer within `CONNECT_S`.
        ProtocolMismatch: one of the two refused; the message names the difference.
    """
    channel = new_channel(address)
    try:
        call = open_call(channel)
        wire = ClientWire(call)
        worker = await _shake_hands(call, wire, hello, address, refused or PeersRefused())
        end = StreamEnd(wire, worker, listener, answers=True, config=config, clock=clock)
        end.open()
    except BaseException:
        await channel.close(None)
        raise
    task = asyncio.create_task(_serve(end, call, channel), name=f"stream to {worker.name}")
    _serving.add(task)
    task.add_done_callback(_served)
    return end


async def _shake_hands(
    call: StreamCall, wire: ClientWire, hello: Hello, address: str, refused: PeersRefused
) -> Hello:
    try:
        async with asyncio.timeout(CONNECT_S):
            await wire.write(codec.encode_hello(hello))
            frame = await wire.read()
        worker = codec.hello_of(frame if frame is not None else codec.Frame())
    except TimeoutError as error:
        msg = f"{address} did not answer the handshake within {CONNECT_S} s"
        raise PeerUnavailable(msg) from error
    except ConnectionError as error:
        if await call.code() is grpc.StatusCode.FAILED_PRECONDITION:
            differing = await call.details()
            refused.count(differing or "")
            _log_refusal("%s refused our stream: %s", address, differing)
            raise ProtocolMismatch(differing) from error
        msg = f"{address}: {error}"
        raise PeerUnavailable(msg) from error
    except ValueError as error:
        refused.count(NO_HELLO)
        msg = f"{address} does not speak this protocol: {error}"
        raise ProtocolMismatch(msg) from error
    differing = difference(hello, worker)
    if differing is not None:
        refused.count(differing)
        _log_refusal("will not talk to %s: %s", address, differing)
        raise ProtocolMismatch(differing)
    return worker


def _log_refusal(message: str, address: str, reason: str) -> None:
    """Warn once, then say it to who debugs."""
    known = (address, reason) in _refusals
    _log.log(logging.DEBUG if known else logging.WARNING, message, address, reason)
    if not known:
        if len(_refusals) >= _MAX_REFUSALS:
            del _refusals[next(iter(_refusals))]
        _refusals[address, reason] = None


async def _serve(end: StreamEnd, call: StreamCall, channel: grpc.aio.Channel) -> None:
    try:
        await end.run()
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(_END_S):
                await call.done_writing()
                await call.code()
    finally:
        await channel.close(None)


def _served(task: asyncio.Task[None]) -> None:
    _serving.discard(task)
    if not task.cancelled() and (error := task.exception()):
        _log.error("%s: its listener failed", task.get_name(), exc_info=error)
