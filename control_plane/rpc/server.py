"""A worker's gRPC server: checks who opens a stream and hands it to the owner of its kind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from control_plane.rpc import codec
from control_plane.rpc.grpc_wire import ServerContext, ServerWire, new_server
from control_plane.rpc.handshake import NO_HELLO, difference
from control_plane.rpc.interface import StreamListener
from control_plane.rpc.refusals import PeersRefused
from control_plane.rpc.stream_end import StreamEnd
from core.clock import Clock
from core.config import ControlPlaneConfig
from core.errors import UsageError
from core.worker_record import Hello

HELLO_S = 5.0
"""How long an opener may take to say hello."""

_log = logging.getLogger(__name__)


class RpcServer:
    """Serves streams of the kinds that have a listener ("router", "decode").

    Args:
        hello: what this worker says; asked for every stream.
        refused: counts whom it refuses.
    """

    def __init__(
        self,
        hello: Callable[[], Hello],
        *,
        config: ControlPlaneConfig,
        clock: Clock,
        refused: PeersRefused | None = None,
    ) -> None:
        self._hello = hello
        self._config = config
        self._clock = clock
        self._refused = refused or PeersRefused()
        self._listeners: dict[str, StreamListener[Any]] = {}
        self._open: set[StreamEnd] = set()
        self._server: grpc.aio.Server | None = None

    def listen(self, kind: str, listener: StreamListener[Any]) -> None:
        """Hand streams whose opener is of this kind to `listener`; before `start`."""
        self._listeners[kind] = listener

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port; 0 takes a free one.

        Raises:
            UsageError: the address is in use or not of this machine.
        """
        server = new_server(self._connect)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            msg = f"cannot listen on {host}:{port}: in use, or not an address of this machine"
            raise UsageError(msg) from error
        await server.start()
        self._server = server
        return bound

    async def stop(self, grace_s: float) -> None:
        """Close every stream, waiting at most `grace_s` for what they still have to say."""
        for end in self._open:
            end.close("the worker stops")
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None

    async def _connect(self, _: object, context: ServerContext) -> None:
        wire = ServerWire(context)
        try:
            opener = await _first_hello(wire)
        except (TimeoutError, ValueError) as error:
            self._refused.count(NO_HELLO)
            return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no hello: {error}")
        ours = self._hello()
        differing = difference(opener, ours)
        if differing is None and opener.kind not in self._listeners:
            differing = f"kind: {opener.kind!r} is not served, only {sorted(self._listeners)}"
        if differing is not None:
            self._refused.count(differing)
            _log.warning("refused a stream of %s %s: %s", opener.kind, opener.name, differing)
            return await context.abort(grpc.StatusCode.FAILED_PRECONDITION, differing)
        try:
            await wire.write(codec.encode_hello(ours))
        except ConnectionError:
            return None
        end = StreamEnd(
            wire,
            opener,
            self._listeners[opener.kind],
            answers=False,
            config=self._config,
            clock=self._clock,
        )
        self._open.add(end)
        try:
            end.open()
            await end.run()
        finally:
            self._open.discard(end)
        return None


async def _first_hello(wire: ServerWire) -> Hello:
    async with asyncio.timeout(HELLO_S):
        frame = await wire.read()
    if frame is None:
        msg = "the stream ended"
        raise ValueError(msg)
    return codec.hello_of(frame)
