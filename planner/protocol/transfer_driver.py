"""A transport on the simulation's loop: `kv_transfer.transfer_driver.TransferDriver`, as
`TransferThread` is one.

Where the thread polls, sleeping in between, this one is woken when the fabric has something for it;
it looks under the same condition, so what nobody polls for is not seen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from core.errors import FabricError
from kv_transfer.descriptors import merge_neighbours
from kv_transfer.inprocess.model import Dice
from kv_transfer.transfer_thread import Tag, TransferOutcome, payload_of
from kv_transfer.transport import (
    Notification,
    Poll,
    RemoteRegion,
    Span,
    TransferHandle,
    TransferState,
    Transport,
)
from planner.protocol.process import Lane, Process
from planner.protocol.virtual_loop import VirtualLoop

T = TypeVar("T")

_HANDOVER_S = 0.001
_POLL_S = 0.001


class Fabric(Protocol):
    """What the hardware must be told; `nic.Nic`."""

    def poke(self) -> None:
        """Something may be due now."""
        ...

    def polling_changed(self) -> None:
        """This process began or stopped to look at the fabric."""
        ...

    def posted(
        self,
        handle: TransferHandle,
        remote: RemoteRegion,
        local: Sequence[Span],
        target: Sequence[Span],
        tag: bytes,
    ) -> None:
        """A write was posted; spans as they are on the wire."""
        ...


class SimTransfer:
    """Drives one process's transport."""

    def __init__(
        self,
        transport: Transport,
        process: Process,
        *,
        loop: VirtualLoop,
        dice: Dice,
        fabric: Fabric,
        on_notification: Callable[[Notification], None],
    ) -> None:
        self._transport = transport
        self._process = process
        self._loop = loop
        self._dice = dice
        self._fabric = fabric
        self._on_notification = on_notification
        self._jobs: list[Callable[[], None]] = []
        self._pending: dict[TransferHandle, tuple[asyncio.Future[TransferOutcome], float, int]] = {}
        self._round_replies: list[Callable[[], None]] = []
        self._replies: deque[list[Callable[[], None]]] = deque()
        self._last_reply_at = 0.0
        self._num_watched = 0
        self._is_awake = False

    @property
    def is_polling(self) -> bool:
        """Whether it looks for what comes."""
        return bool(self._pending or self._num_watched)

    def wake(self) -> None:
        """The fabric has news; seen at the next poll, if there is one."""
        if self.is_polling:
            self._wake(_POLL_S)

    # --- TransferDriver ---------------------------------------------------------------------------

    def call(self, function: Callable[[Transport], T]) -> asyncio.Future[T]:
        """Run `function(transport)`, in the order of calls."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                result = function(self._transport)
            except Exception as error:  # noqa: BLE001 - it goes to whoever awaits the future
                failure = error
                self._round_replies.append(lambda: _fail(future, failure))
            else:
                self._round_replies.append(lambda: _resolve(future, result))

        self._submit(job)
        return future

    def write(
        self, remote: RemoteRegion, local: Sequence[Span], target: Sequence[Span], tag: Tag
    ) -> asyncio.Future[TransferOutcome]:
        """Post a write; the future resolves with its end."""
        future: asyncio.Future[TransferOutcome] = self._loop.create_future()

        def job() -> None:
            try:
                here, there = merge_neighbours(local, target)
                payload = payload_of(tag, self._transport)
                handle = self._transport.write(remote, here, there, payload)
            except (ValueError, FabricError) as error:
                failure = error
                self._round_replies.append(lambda: _fail(future, failure))
                return
            num_bytes = sum(span.num_bytes for span in here)
            self._pending[handle] = future, self._loop.time(), num_bytes
            self._fabric.posted(handle, remote, here, there, payload)

        self._submit(job)
        return future

    def watch(self) -> None:
        """An inbound handoff opened: look for notifications. Balanced by `unwatch`."""
        self._num_watched += 1
        self._wake(_HANDOVER_S)
        self._fabric.polling_changed()

    def unwatch(self) -> None:
        """An inbound handoff ended."""
        assert self._num_watched > 0, "unwatch without watch"
        self._num_watched -= 1
        self._fabric.polling_changed()

    async def renew(self, make: Callable[[], Transport]) -> None:
        """Destroy the transport and go on with a new one; pending writes end as FAILED."""

        def replace(transport: Transport) -> None:
            transport.close()
            for handle in list(self._pending):
                self._finish(handle, Poll(TransferState.FAILED, "the agent was destroyed"))
            self._transport = make()

        await self.call(replace)

    # --- the "thread" -----------------------------------------------------------------------------

    def _submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._wake(_HANDOVER_S)

    def _wake(self, within_s: float) -> None:
        if not self._is_awake:
            self._is_awake = True
            at = self._loop.time() + self._dice.uniform(0.0, within_s)
            self._loop.call_in(self._process, Lane.FABRIC, at, self._round)

    def _round(self) -> None:
        self._is_awake = False
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job()
        for handle in list(self._pending):
            poll = self._transport.poll(handle)
            if poll.state is not TransferState.PENDING:
                self._finish(handle, poll)
        if self.is_polling:
            for notification in self._transport.notifications():
                self._notify(notification)
        self._fabric.poke()
        if self._round_replies:
            self._flush()

    def _notify(self, notification: Notification) -> None:
        self._round_replies.append(lambda: self._on_notification(notification))

    def _finish(self, handle: TransferHandle, poll: Poll) -> None:
        future, started, num_bytes = self._pending.pop(handle)
        outcome = TransferOutcome(
            state=poll.state,
            reason=poll.reason,
            posted_s=0.0,
            seconds=self._loop.time() - started,
            num_bytes=num_bytes,
            num_descriptors=1,
        )
        self._round_replies.append(lambda: _resolve(future, outcome))

    def _flush(self) -> None:
        at = self._loop.time() + self._dice.uniform(0.0, _HANDOVER_S)
        self._last_reply_at = max(self._last_reply_at, at)
        self._replies.append(self._round_replies)
        self._round_replies = []
        self._loop.call_in(self._process, Lane.LOOP, self._last_reply_at, self._deliver)

    def _deliver(self) -> None:
        for reply in self._replies.popleft():
            reply()


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
