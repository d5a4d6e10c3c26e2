"""The client over streams that end, fail and are cancelled, as real servers do it rarely."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from etcd3aio import EtcdError
from grpc.aio import AioRpcError, Metadata, UsageError

from control_plane.etcd.client import EtcdClient, WatchLostError
from control_plane.etcd.credentials import Credentials
from control_plane.etcd.failures import Failure, classify, describe
from control_plane.etcd.session import Session
from core.clock import ManualClock
from core.config import ControlPlaneConfig
from core.errors import ControlPlaneError

pytestmark = pytest.mark.anyio

AIO: Any = grpc.aio


def rpc_error(code: grpc.StatusCode, words: str = "") -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), words, None)


def response(
    *, revision: int = 7, canceled: bool = False, reason: str = "", compacted: int = 0
) -> SimpleNamespace:
    return SimpleNamespace(
        header=SimpleNamespace(revision=revision),
        canceled=canceled,
        cancel_reason=reason,
        compact_revision=compacted,
        events=[],
    )


class Stream:
    """Says what it is to say, and raises what is an error."""

    def __init__(self, said: Sequence[Any]) -> None:
        self._said = [*said]
        self.is_cancelled = False

    async def write(self, _: object) -> None: ...

    async def read(self) -> Any:
        one = self._said.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    def cancel(self) -> None:
        self.is_cancelled = True


class Member:
    """A `Connection` to a member whose one stream is given."""

    endpoint = "m:1"

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.lease = SimpleNamespace(keep_alive=lambda _: self._stream)
        self.is_up = True

    def is_ready(self) -> bool:
        return self.is_up

    def use_token(self, token: str) -> None: ...

    def watch_stream(self) -> Stream:
        return self._stream


def client_over(stream: Stream) -> EtcdClient:
    client = EtcdClient(ControlPlaneConfig(etcd="m:1"), clock=ManualClock())
    connections: Any = SimpleNamespace(
        current=Member(stream),
        have_all_failed=True,
        answered=lambda: None,
        failed=lambda _: None,
    )
    client._connections = connections
    return client


@pytest.mark.parametrize(
    ("said", "words", "compact_revision"),
    [
        ([response(), AIO.EOF], "the stream ended", 0),
        ([response(canceled=True, reason="permission denied")], "permission denied", 0),
        ([response(revision=3)], "another history", 0),
        ([response(compacted=6)], "compacted up to 6", 6),
    ],
)
async def test_a_watch_that_may_miss_something_is_lost(
    said: list[Any], words: str, compact_revision: int
) -> None:
    stream = Stream(said)
    watch = client_over(stream).watch("/p/", 5)
    async with contextlib.aclosing(watch):
        with pytest.raises(WatchLostError, match=words) as lost:
            await anext(watch)
    assert lost.value.compact_revision == compact_revision
    assert stream.is_cancelled


async def test_a_watch_whose_connection_breaks_is_told_as_any_call() -> None:
    stream = Stream([rpc_error(grpc.StatusCode.UNAVAILABLE, "Socket closed")])
    watch = client_over(stream).watch("/p/", 5)
    async with contextlib.aclosing(watch):
        with pytest.raises(ControlPlaneError, match="watch of /p/: Socket closed"):
            await anext(watch)
    assert stream.is_cancelled


async def test_a_keepalive_without_an_answer_says_nothing_of_the_lease() -> None:
    stream = Stream([AIO.EOF])
    with pytest.raises(ControlPlaneError, match="ended without an answer"):
        await client_over(stream).keep_alive(1)
    assert stream.is_cancelled


@pytest.mark.parametrize(
    ("error", "failure", "words"),
    [
        (TimeoutError(), Failure.OUTAGE, "no answer within the deadline"),
        (EtcdError("odd"), Failure.OUTAGE, "odd"),
        (UsageError("Channel is closed."), Failure.REFUSAL, "Channel is closed."),
        (rpc_error(grpc.StatusCode.UNAVAILABLE), Failure.OUTAGE, "UNAVAILABLE"),
        (rpc_error(grpc.StatusCode.NOT_FOUND, "lease"), Failure.REFUSAL, "lease"),
        (
            rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests"),
            Failure.OUTAGE,
            "etcdserver: too many requests",
        ),
        (rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED), Failure.NO_SPACE, "RESOURCE_EXHAUSTED"),
        (
            rpc_error(grpc.StatusCode.UNKNOWN, "auth: revision in header is old"),
            Failure.STALE_TOKEN,
            "auth: revision in header is old",
        ),
    ],
)
def test_failures_are_told_apart(error: Exception, failure: Failure, words: str) -> None:
    assert (classify(error), describe(error)) == (failure, words)


def test_an_error_that_etcd3aio_wrapped_is_known_by_what_it_wraps() -> None:
    wrapped = EtcdError("KV.Range failed")
    wrapped.__cause__ = rpc_error(
        grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied"
    )
    assert classify(wrapped) is Failure.NO_PERMISSION


def test_connecting_has_a_deadline_of_its_own() -> None:
    """An etcd half a second away needs one second for that, and another one for the call."""
    member: Any = Member(Stream([]))
    session = Session(Credentials(), 2.0)
    assert session._deadline_s(member) == 2.0
    member.is_up = False
    assert session._deadline_s(member) == 4.0
    assert session._deadline_s(member, 10) == 22.0
