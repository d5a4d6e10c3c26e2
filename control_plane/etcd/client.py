"""etcd3aio, wrapped once: every call has a deadline, every failure is a `ControlPlaneError`.

A server that hangs would hang etcd3aio's calls for as long, so nothing else of it is used: leases
are kept by `control_plane.etcd.lease`, watches by `control_plane.etcd.prefix_watch`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from random import Random, SystemRandom
from typing import Any, TypeVar

import grpc.aio
from etcd3aio import SortOrder, SortTarget, prefix_range_end
from etcd3aio import _protobuf as untyped_protobuf
from etcd3aio.kv import KVService as UntypedKvService

from control_plane.etcd.connections import Connection, Connections
from control_plane.etcd.credentials import read_credentials
from control_plane.etcd.endpoints import read_endpoints
from control_plane.etcd.failures import FAILURES, Failure, classify, describe
from control_plane.etcd.outage import OutageLog
from control_plane.etcd.session import Session
from control_plane.etcd.slips import slip_line
from control_plane.etcd.values import Deleted, KeyValue, Listing, Look, Newest, Put
from core.addresses import is_loopback
from core.clock import Clock
from core.config import ControlPlaneConfig
from core.errors import ConfigError, ControlPlaneError, DovetailError

_log = logging.getLogger(__name__)

T = TypeVar("T")

KvService: Any = UntypedKvService
"""etcd3aio's protobuf modules have no types; ours begin in this file."""

_protobuf: Any = untyped_protobuf
WatchCreateRequest, WatchRequest = _protobuf.WatchCreateRequest, _protobuf.WatchRequest

_LISTING_DEADLINES = 10
"""A listing may take so many deadlines: 64 workers with 100,000 blocks each are 100 MB."""


class WatchLostError(ControlPlaneError):
    """A watch that may have missed something: list again.

    Attributes:
        compact_revision: history up to it is gone, and the watch was to start there; 0: not that.
    """

    def __init__(self, message: str, *, compact_revision: int = 0) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision


class EtcdClient:
    """A cluster's etcd. Make it, `connect`, use it on one event loop, `close`.

    While etcd was never reached, a refusal that only the user can end (a wrong password or CA, a
    role without permission) raises `ConfigError`, once, in place of `ControlPlaneError`: whoever
    runs in the background fails with it, and so the process ends with one line. Later the same is
    an outage: serving goes on.

    Args:
        config: `etcd` names the endpoints, `request_timeout_s` bounds each call.
        rng: draws the jitter of all that waits for etcd; by default the system's.

    Raises:
        ConfigError: no endpoint is named, or a file or a password cannot be used.
    """

    def __init__(
        self, config: ControlPlaneConfig, *, clock: Clock, rng: Random | None = None
    ) -> None:
        self._config = config
        self.clock = clock
        self._endpoints = read_endpoints(config)
        self._credentials = read_credentials(config, self._endpoints)
        self.rng = rng or SystemRandom()
        self._session = Session(self._credentials, config.request_timeout_s)
        if self._credentials.user and not self._endpoints.is_tls:
            _warn_of_open_password(self._endpoints.names)
        how = "over TLS" if self._endpoints.is_tls else "without TLS"
        self._outage = OutageLog(f"{', '.join(self._endpoints.names)} {how}", clock)
        self._has_told_slip = False
        self._allowed: set[str] = set()
        self._denied: set[str] = set()
        self._connections: Connections

    async def connect(self) -> None:
        """Prepare the connections, on the running loop; etcd need not be there yet."""
        names = self._endpoints.names
        first = int(self.rng.random() * len(names))
        self._connections = Connections(names, self._credentials, first=first)

    async def close(self) -> None:
        """Drop the connections; later calls raise ControlPlaneError."""
        await self._connections.close()

    async def get(self, key: str) -> KeyValue | None:
        """Return a key, None if there is none.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        return (await self.look(key)).item

    async def look(self, key: str) -> Look:
        """Return a key, if there is one, and the revision that etcd has reached.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        response = await self._call("get", lambda etcd: etcd.kv.get(key))
        item = _key_value(response.kvs[0]) if response.kvs else None
        return Look(response.header.revision, item)

    async def get_prefix(self, prefix: str) -> Listing:
        """Return all keys under a prefix at one revision.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        end = prefix_range_end(prefix)
        response = await self._call(
            "list", lambda etcd: etcd.kv.get(prefix, end), num_deadlines=_LISTING_DEADLINES
        )
        return Listing(response.header.revision, tuple([_key_value(kv) for kv in response.kvs]))

    async def newest(self, prefix: str) -> Newest:
        """Return a summary of a prefix, at the cost of one key.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        response = await self._call(
            "poll",
            lambda etcd: etcd.kv.get(
                prefix,
                prefix_range_end(prefix),
                limit=1,
                sort_order=SortOrder.DESCEND,
                sort_target=SortTarget.MOD,
                keys_only=True,
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
            "transaction",
            lambda etcd: etcd.kv.txn(compares, operations),
            writes=bool(puts),
        )
        return int(response.header.revision) if response.succeeded else None

    async def grant_lease(self, ttl_s: float) -> tuple[int, float]:
        """Return a new lease's id and its time to live in s, which etcd may have raised.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        ttl = max(1, math.ceil(ttl_s))
        response = await self._call("grant lease", lambda etcd: etcd.lease.grant(ttl), writes=True)
        return int(response.ID), float(response.TTL)

    async def keep_alive(self, lease: int) -> float:
        """Renew a lease once; return its time to live in s, 0 when it is gone.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """

        async def once(etcd: Connection) -> Any:
            stream: Any = etcd.lease.keep_alive(lease)
            try:
                response = await stream.read()
            finally:
                stream.cancel()
            if response is _EOF:  # it says nothing of the lease
                msg = "the stream ended without an answer"
                raise TimeoutError(msg)
            return response

        response = await self._call("keep lease alive", once)
        return max(0.0, float(response.TTL))

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and delete its keys.

        Raises:
            ControlPlaneError: no answer within the deadline, or refused.
        """
        await self._call("revoke lease", lambda etcd: etcd.lease.revoke(lease))

    async def watch(
        self, prefix: str, start_revision: int
    ) -> AsyncGenerator[list[KeyValue | Deleted]]:
        """Yield the changes of a prefix from a revision on, for as long as none can be missed.

        Close the generator (`contextlib.aclosing`) when done with it.

        Raises:
            WatchLostError: cancelled, compacted, or the connection was a new one.
            ControlPlaneError: refused.
        """
        stream: Any = self._connections.current.watch_stream()
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
                    raise WatchLostError(msg, compact_revision=response.compact_revision)
                # An etcd without its data has yet to reach our revision.
                if response.canceled or response.header.revision < start_revision - 1:
                    msg = f"watch of {prefix}: {response.cancel_reason or 'another history'}"
                    raise WatchLostError(msg)
                if response.events:
                    yield [_change(event) for event in response.events]
        except FAILURES as error:
            msg = f"etcd: watch of {prefix}: {describe(error)}"
            raise ControlPlaneError(msg) from error
        finally:
            stream.cancel()
        msg = f"watch of {prefix}: the stream ended"
        raise WatchLostError(msg)

    async def _call(
        self,
        operation: str,
        call: Callable[[Connection], Awaitable[T]],
        *,
        writes: bool = False,
        num_deadlines: int = 1,
    ) -> T:
        connection = self._connections.current
        try:
            response = await self._session.call(connection, call, num_deadlines=num_deadlines)
        except FAILURES as error:
            raise self._failed(operation, connection.endpoint, error) from error
        self._connections.answered()
        self._outage.answered(wrote=writes)
        self._allowed.add(operation)
        self._denied.discard(operation)
        return response

    def _failed(self, operation: str, endpoint: str, error: BaseException) -> DovetailError:
        """Take note of a failure, and return what to raise."""
        failure, words = classify(error), describe(error)
        message = f"etcd: {operation}: {words}"
        match failure:
            case Failure.REFUSAL:
                slip = None
            case Failure.NO_SPACE:
                slip = None
                self._outage.full(message)
            case Failure.NO_PERMISSION:
                is_new = operation not in self._allowed
                slip = self._slip(failure, words, endpoint) if is_new else None
                if slip is None and operation not in self._denied:
                    self._denied.add(operation)
                    _log.warning("%s", message)
            case _:
                slip = self._unanswered(failure, words, endpoint, message)
        return slip or ControlPlaneError(message)

    def _unanswered(
        self, failure: Failure, words: str, endpoint: str, message: str
    ) -> ConfigError | None:
        self._connections.failed(endpoint)
        if not self._connections.have_all_failed:
            return None
        slip = None if self._outage.was_reached else self._slip(failure, words, endpoint)
        if not self._has_told_slip:  # else the process is about to end
            self._outage.failed(message)
        return slip

    def _slip(self, failure: Failure, words: str, endpoint: str) -> ConfigError | None:
        if self._has_told_slip:
            return None
        line = slip_line(
            failure,
            words,
            endpoint=endpoint,
            password_from=self._credentials.password_from,
            config=self._config,
        )
        self._has_told_slip = line is not None
        return ConfigError(line) if line else None


def _warn_of_open_password(names: Sequence[str]) -> None:
    far = [name for name in names if not is_loopback(name.rpartition(":")[0])]
    if far:
        _log.warning("the password for etcd goes to %s unencrypted; use https", ", ".join(far))


_aio: Any = grpc.aio
_EOF: object = _aio.EOF


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(_key(kv), kv.value, kv.mod_revision, kv.lease)


def _key(kv: Any) -> str:
    """Return a key that others may have written as they liked; ours are ASCII."""
    return kv.key.decode(errors="backslashreplace")


def _change(event: Any) -> KeyValue | Deleted:
    if event.type == 1:  # mvccpb.Event.DELETE
        return Deleted(_key(event.kv), event.kv.mod_revision)
    return _key_value(event.kv)
