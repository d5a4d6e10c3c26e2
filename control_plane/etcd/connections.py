"""Connections to the members of an etcd cluster, one channel each, of which one is used at a time.

Not one channel for all with gRPC's round robin: a member that is frozen or cut off from the others
would go on getting its share of the calls, each of which takes a deadline to fail; and with TLS
each member's certificate must be held against its own name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from etcd3aio import _protobuf as untyped_protobuf
from etcd3aio.auth import AuthService
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService

from control_plane.etcd.credentials import Credentials

_log = logging.getLogger(__name__)
logging.getLogger("etcd3aio").setLevel(logging.ERROR)  # it would warn at each attempt

_protobuf: Any = untyped_protobuf
"""etcd3aio's protobuf modules have no types."""

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),  # a listing may exceed gRPC's 4 MiB
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # its default is two minutes after a long outage
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class Connection:
    """One member: its channel and etcd3aio's services over it, untyped.

    The member need not be there, nor its name resolve: gRPC tries again by itself.
    """

    def __init__(self, endpoint: str, credentials: Credentials) -> None:
        self.endpoint = endpoint
        target = f"dns:///{endpoint}"
        self._channel = (
            grpc.aio.insecure_channel(target, options=_OPTIONS)
            if credentials.tls is None
            else grpc.aio.secure_channel(target, credentials.tls, options=_OPTIONS)
        )
        self.kv: Any = KVService(self._channel)
        self.lease: Any = LeaseService(self._channel)
        self._auth: Any = AuthService(self._channel)
        # Not etcd3aio's own watch: it connects again by itself, from a revision that may skip
        # events, and leaves a pending task behind each time.
        self._watch: Any = _protobuf.WatchStub(self._channel)
        self._metadata: tuple[tuple[str, str], ...] | None = None

    def use_token(self, token: str) -> None:
        """Send a token with every call from now on; an empty one is none."""
        self.kv.set_token(token)
        self.lease.set_token(token)
        self._metadata = (("token", token),) if token else None

    def watch_stream(self) -> Any:
        """Open a stream for watches."""
        return self._watch.Watch(metadata=self._metadata)

    def is_ready(self) -> bool:
        """Whether a call would go out at once, over a connection that is there."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def authenticate(self, user: str, password: str) -> str:
        """Return a new token. Raises one of `failures.FAILURES`."""
        return (await self._auth.authenticate(user, password)).token

    async def close(self) -> None:
        """Drop it; calls raise `grpc.aio.UsageError` from now on."""
        await self._channel.close(None)


class Connections:
    """All members; `current` serves until it `failed`, then the next one does.

    Args:
        first: index of the member to begin with; clients begin with different ones.
    """

    def __init__(self, endpoints: Sequence[str], credentials: Credentials, *, first: int) -> None:
        self._all = [Connection(endpoint, credentials) for endpoint in endpoints]
        self._at = first
        self._failed: set[str] = set()

    @property
    def current(self) -> Connection:
        """Which one is used now."""
        return self._all[self._at]

    @property
    def have_all_failed(self) -> bool:
        """Whether each failed since one answered last."""
        return len(self._failed) == len(self._all)

    def answered(self) -> None:
        """One did its work."""
        self._failed.clear()

    def failed(self, endpoint: str) -> None:
        """Go on with the next one, unless calls that failed at the same time have seen to it."""
        self._failed.add(endpoint)
        if endpoint == self.current.endpoint and len(self._all) > 1:
            self._at = (self._at + 1) % len(self._all)
            if not self.have_all_failed:
                _log.info("etcd at %s does not answer: %s is next", endpoint, self.current.endpoint)

    async def close(self) -> None:
        """Drop all."""
        for connection in self._all:
            await connection.close()
