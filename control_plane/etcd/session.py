"""The token that stands for our user and password, renewed whenever etcd does not take it any more.

etcd forgets tokens: after a time, when it restarts, and (JWT) when any user or role is changed. A
call with such a token was certainly not carried out, so it is repeated with a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from control_plane.etcd.connections import Connection
from control_plane.etcd.credentials import Credentials
from control_plane.etcd.failures import FAILURES, Failure, classify

T = TypeVar("T")


class Session:
    """One client's. Without a user it adds nothing to a call.

    Args:
        timeout_s: deadline of each call, of each authentication, and of connecting before it: an
            etcd half a second away needs a second for each.
    """

    def __init__(self, credentials: Credentials, timeout_s: float) -> None:
        self._user = credentials.user
        self._password = credentials.password
        self._timeout_s = timeout_s
        self._token: str | None = None if credentials.user else ""
        self._renewing = asyncio.Lock()

    async def call(
        self,
        connection: Connection,
        call: Callable[[Connection], Awaitable[T]],
        *,
        num_deadlines: float = 1,
    ) -> T:
        """Call with a token, and once more where the token was stale.

        Raises:
            one of `failures.FAILURES`
        """
        if self._token is None:
            await self._renew(connection, None)
        token = self._token
        try:
            return await self._once(connection, call, num_deadlines)
        except FAILURES as error:
            if not self._user or not _is_about_token(error):
                raise
        await self._renew(connection, token)
        return await self._once(connection, call, num_deadlines)

    async def _once(
        self,
        connection: Connection,
        call: Callable[[Connection], Awaitable[T]],
        num_deadlines: float,
    ) -> T:
        connection.use_token(self._token or "")
        async with asyncio.timeout(self._deadline_s(connection, num_deadlines)):
            return await call(connection)

    async def _renew(self, connection: Connection, stale: str | None) -> None:
        async with self._renewing:
            if self._token != stale:
                return  # another call did it
            try:
                async with asyncio.timeout(self._deadline_s(connection)):
                    self._token = await connection.authenticate(self._user, self._password)
            except grpc.aio.AioRpcError as error:
                # Users may be switched on later; etcd then says that a call came without one.
                if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                self._token = ""

    def _deadline_s(self, connection: Connection, num_deadlines: float = 1) -> float:
        return self._timeout_s * (num_deadlines if connection.is_ready() else num_deadlines + 1)


def _is_about_token(error: BaseException) -> bool:
    return classify(error) in (Failure.STALE_TOKEN, Failure.BAD_USER)
