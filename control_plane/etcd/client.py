"""etcd3aio, wrapped once: every call has a deadline, every failure is a `ControlPlaneError`.

A server that hangs would hang etcd3aio's calls for as long, so nothing else of it is used: leases
are kept by `control_plane.etcd.lease`, watches by `control_plane.etcd.prefix_watch`. One line is logged when
etcd stops answering (or does not yet) and one when it does, however many calls fail between.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from random import Random, SystemRandom
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec
from etcd3aio import EtcdError, SortOrder, SortTarget, prefix_range_end
from etcd3aio import _protobuf as untyped_protobuf
from etcd3aio.kv import KVService as UntypedKvService
from etcd3aio.lease import LeaseService

from core.clock import Clock
from core.config import ControlPlaneConfig
from core.errors import ConfigError, ControlPlaneError

_log = logging.getLogger(__name__)
logging.getLogger("etcd3aio").setLevel(logging.ERROR)  # it would warn at each attempt

T = TypeVar("T")

KvService: Any = UntypedKvService
"""etcd3aio's protobuf modules have no types; ours begin in this file."""

_protobuf: Any = untyped_protobuf
WatchCreateRequest, WatchRequest = _protobuf.WatchCreateRequest, _protobuf.WatchRequest

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),  # a listing may exceed gRPC's 4 MiB
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # its default is two minutes after a long outage
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class KeyValue(msgspec.Struct, frozen=True):
    """One key as etcd holds it.

    Attributes:
        mod_revision: the revision of its last write.
        lease: id of the lease that it hangs on; 0: none.
    """

    key: str
    value: bytes
    mod_revision: int
    lease: int = 0


class Deleted(msgspec.Struct, frozen=True):
    """A key that is gone: deleted, or its lease ended."""

    key: str
    mod_revision: int


class Listing(msgspec.Struct, frozen=True):
    """All keys of a prefix at one revision, in the order of their names."""

    revision: int
    items: tuple[KeyValue, ...]


class Put(msgspec.Struct, frozen=True):
    """A write within a transaction."""

    key: str
    value: bytes
    lease: int = 0


class Newest(msgspec.Struct, frozen=True):
    """What a prefix looks like from afar: the last write among its living keys, and how many."""

    revision: int
    mod_revision: int
    num_keys: int


class WatchLostError(ControlPlaneError):
    """A watch that may have missed something: list again.

    Attributes:
        compacted: the revisions that it was to start from are gone.
    """

    def __init__(self, message: str, *, compacted: bool = False) -> None:
        super().__init__(message)
        self.compacted = compacted


class EtcdClient:
    """A cluster's etcd. Make it, `connect`, use it on one event loop, `close`.

    Args:
        config: `etcd` names the endpoints, `request_timeout_s` bounds each call.
        rng: draws the jitter of all that waits for etcd; by default the system's.

    Raises:
        ConfigError: no endpoint is named.
    """

    def __init__(
        self, config: ControlPlaneConfig, *, clock: Clock, rng: Random | None = None
    ) -> None:
        self._endpoints = [part.strip() for part in config.etcd.split(",") if part.strip()]
        if not self._endpoints:
            msg = "control_plane.etcd = '': name at least one endpoint, such as 127.0.0.1:2379"
            raise ConfigError(msg)
        self._timeout_s = config.request_timeout_s
        self.rng = rng or SystemRandom()
        self._clock = clock
        self._down_since: float | None = None
        self._was_reached = False
        self._channel: grpc.aio.Channel | None = None
        self._kv: Any
        self._lease: Any
        self._watch: Any

    async def connect(self) -> None:
        """Prepare the connection; etcd need not be there yet.

        Raises:
            ControlPlaneError: a host name does not resolve.
        """
        channel = grpc.aio.insecure_channel(await _target(self._endpoints), options=[*_OPTIONS])
        self._channel = channel
        self._kv = KvService(channel)
        self._lease = LeaseService(channel)
        # Not etcd3aio's own watch: it connects again by itself, from a revision that may skip
        # events, and leaves a pending task behind each time.
        self._watch = _protobuf.WatchStub(channel)

    async def close(self) -> None:
        """Drop the connection; later calls raise ControlPlaneError."""
        if self._channel is not None:
            await self._channel.close(None)

    async def get(self, key: str) -> KeyValue | None:
        """Return a key, None if there is none.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        response = await self._call("get", lambda: self._kv.get(key, timeout=self._timeout_s))
        return _key_value(response.kvs[0]) if response.kvs else None

    async def get_prefix(self, prefix: str) -> Listing:
        """Return all keys under a prefix at one revision.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        end = prefix_range_end(prefix)
        response = await self._call(
            "list", lambda: self._kv.get(prefix, end, timeout=self._timeout_s)
        )
        return Listing(response.header.revision, tuple([_key_value(kv) for kv in response.kvs]))

    async def newest(self, prefix: str) -> Newest:
        """Return a summary of a prefix, at the cost of one key.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        response = await self._call(
            "poll",
            lambda: self._kv.get(
                prefix,
                prefix_range_end(prefix),
                limit=1,
                sort_order=SortOrder.DESCEND,
                sort_target=SortTarget.MOD,
                keys_only=True,
                timeout=self._timeout_s,
            ),
        )
        newest = response.kvs[0].mod_revision if response.kvs else 0
        return Newest(response.header.revision, newest, response.count)

    async def transaction(
        self,
        expect: Mapping[str, bytes | None],
        puts: Sequence[Put],
        *,
        deletes: Sequence[str] = (),
        delete_ranges: Sequence[tuple[str, str]] = (),
    ) -> int | None:
        """Write and delete at one revision iff each expected key has its value (None: is absent).

        Returns that revision, None when an expectation failed. No key may be both written and
        deleted. A range ends before its second key.

        Raises:
            ControlPlaneError: no answer within the deadline (it may have happened), or refused.
        """
        compares = [
            KvService.txn_compare_create_revision(key, 0)
            if value is None
            else KvService.txn_compare_value(key, value)
            for key, value in expect.items()
        ]
        operations = [
            *[KvService.txn_op_put(put.key, put.value, lease=put.lease) for put in puts],
            *[KvService.txn_op_delete(key) for key in deletes],
            *[KvService.txn_op_delete(first, range_end=end) for first, end in delete_ranges],
        ]
        response = await self._call(
            "transaction", lambda: self._kv.txn(compares, operations, timeout=self._timeout_s)
        )
        return int(response.header.revision) if response.succeeded else None

    async def grant_lease(self, ttl_s: float) -> tuple[int, float]:
        """Return a new lease's id and its time to live in s, which etcd may have raised.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        ttl = max(1, math.ceil(ttl_s))
        response = await self._call(
            "grant lease", lambda: self._lease.grant(ttl, timeout=self._timeout_s)
        )
        return int(response.ID), float(response.TTL)

    async def keep_alive(self, lease: int) -> float:
        """Renew a lease once; return its time to live in s, 0 when it is gone.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """

        async def once() -> Any:
            stream: Any = self._lease.keep_alive(lease)
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await stream.read()
            finally:
                stream.cancel()

        response = await self._call("keep lease alive", once)
        return max(0.0, float(response.TTL)) if response is not _EOF else 0.0

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and delete its keys.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        await self._call("revoke lease", lambda: self._lease.revoke(lease, timeout=self._timeout_s))

    async def watch(
        self, prefix: str, start_revision: int
    ) -> AsyncGenerator[list[KeyValue | Deleted]]:
        """Yield the changes of a prefix from a revision on, for as long as none can be missed.

        Close the generator (`contextlib.aclosing`) when done with it.

        Raises:
            WatchLostError: cancelled, compacted, or the connection was a new one.
            ControlPlaneError: refused.
        """
        stream: Any = self._watch.Watch()
        create = WatchCreateRequest(
            key=prefix.encode(),
            range_end=prefix_range_end(prefix),
            start_revision=start_revision,
        )
        try:
            await stream.write(WatchRequest(create_request=create))
            while (response := await stream.read()) is not _EOF:
                if response.compact_revision > 0:
                    msg = f"watch of {prefix}: compacted up to {response.compact_revision}"
                    raise WatchLostError(msg, compacted=True)
                # An etcd without its data has yet to reach our revision.
                if response.canceled or response.header.revision < start_revision - 1:
                    msg = f"watch of {prefix}: {response.cancel_reason or 'another history'}"
                    raise WatchLostError(msg)
                if response.events:
                    yield [_change(event) for event in response.events]
        except _FAILURES as error:
            msg = f"etcd: watch of {prefix}: {_describe(error)}"
            raise ControlPlaneError(msg) from error
        finally:
            stream.cancel()
        msg = f"watch of {prefix}: the stream ended"
        raise WatchLostError(msg)

    async def _call(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await call()
        except _FAILURES as error:
            msg = f"etcd: {operation}: {_describe(error)}"
            if self._down_since is None and not _is_refusal(error):
                self._down_since = self._clock.now()
                _log.warning("%s; %s", msg, self._outlook())
            raise ControlPlaneError(msg) from error
        if self._down_since is not None:
            again = "again " if self._was_reached else ""
            _log.info("etcd answers %safter %.1f s", again, self._clock.now() - self._down_since)
            self._down_since = None
        self._was_reached = True
        return response

    def _outlook(self) -> str:
        """Say what an outage means; a process that never reached etcd serves nobody yet."""
        if self._was_reached:
            return "serving goes on without it"
        return f"waiting for etcd at {', '.join(self._endpoints)}"


_aio: Any = grpc.aio
_EOF: object = _aio.EOF
_FAILURES = (TimeoutError, EtcdError, grpc.aio.AioRpcError, grpc.aio.UsageError)


_REFUSALS = (
    grpc.StatusCode.NOT_FOUND,  # a lease that is gone
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
)


def _is_refusal(error: BaseException) -> bool:
    """Whether etcd is there and said no, or we closed; anything else (no space, too) is outage."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in _REFUSALS
    return isinstance(error, grpc.aio.UsageError)


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or "no answer within the deadline"


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(_key(kv), kv.value, kv.mod_revision, kv.lease)


def _key(kv: Any) -> str:
    """Return a key that others may have written as they liked; ours are ASCII."""
    return kv.key.decode(errors="backslashreplace")


def _change(event: Any) -> KeyValue | Deleted:
    if event.type == 1:  # mvccpb.Event.DELETE
        return Deleted(_key(event.kv), event.kv.mod_revision)
    return _key_value(event.kv)


async def _target(endpoints: Sequence[str]) -> str:
    """Return gRPC's name for the endpoints; one host name is resolved again and again by gRPC."""
    if len(endpoints) == 1:
        return f"dns:///{endpoints[0]}"
    return "ipv4:" + ",".join([await _numeric(endpoint) for endpoint in endpoints])


async def _numeric(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(ValueError):
        return f"{ipaddress.IPv4Address(host)}:{port}"
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        msg = f"control_plane.etcd: {endpoint!r} does not resolve: {error}"
        raise ControlPlaneError(msg) from error
    return f"{found[0][4][0]}:{port}"
