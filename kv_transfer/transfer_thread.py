"""The thread that owns a transport, and the asyncio side's handle on it.

    loop    call(fn), write, read  --queue-->  thread   fn(transport), post, poll
    loop    futures, on_notification  <------  thread   one call_soon_threadsafe an iteration

It polls only while a write or read is pending or an inbound handoff is open (`watch`), sleeping
`poll_s` between rounds, longer the longer nothing happened; otherwise it blocks and takes no
processor time. A poll is also what makes a transport progress, for no backend has a thread of its
own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from core.clock import Clock
from core.errors import FabricError
from kv_transfer.descriptors import merge_neighbours
from kv_transfer.transport import (
    Notification,
    Poll,
    RemoteRegion,
    Span,
    TransferHandle,
    TransferState,
    Transport,
)

MIN_POLL_S = 50e-6
"""Shorter sleeps starve the peer on a small machine: spinning made a round trip 12-48 ms."""

BACKOFF_SHARE = 0.1
"""Sleeps grow to this share of the time since the last event, as while a peer computes: a poll
costs 20 us of processor time, and every 100 us that took 5% of a decode worker's tokens."""

TRANSFER_S = 0.05
"""So long, a transfer of our own may end any moment, and sleeps stay short; one to a frozen peer
stays pending for ever."""

MAX_BACKOFF = 10
"""Sleeps grow to this many times `poll_s`."""

Tag = bytes | Callable[[Transport], bytes]
"""A write's notification, or what makes it on the transport's thread as the write is posted."""

_STOPPED = "the fabric stopped"

_T = TypeVar("_T")

_Post = Callable[[list[Span], list[Span]], TransferHandle]
"""Posts the merged spans, local and remote."""


class TransferOutcome(msgspec.Struct, frozen=True):
    """How a write or read ended.

    Attributes:
        state: DONE, FAILED or REFUSED, as the transport says it.
        posted_s: seconds that posting took (on CMA that is the copy).
        seconds: from the start of posting until the end was seen.
        num_descriptors: after merging neighbours.
        transport: `Health.transport` after it.
    """

    state: TransferState
    reason: str
    posted_s: float
    seconds: float
    num_bytes: int
    num_descriptors: int
    transport: str = ""


class _Transfer(msgspec.Struct):
    future: asyncio.Future[TransferOutcome]
    started: float
    posted_s: float
    num_bytes: int
    num_descriptors: int

    def outcome(self, poll: Poll, now: float, transport: str) -> TransferOutcome:
        """Return how it ended, seen at `now`."""
        return TransferOutcome(
            state=poll.state,
            reason=poll.reason,
            posted_s=self.posted_s,
            seconds=now - self.started,
            num_bytes=self.num_bytes,
            num_descriptors=self.num_descriptors,
            transport=transport,
        )


class _Job(msgspec.Struct):
    """Something to run on the thread, and who waits for it."""

    run: Callable[[], None]
    future: asyncio.Future[Any] | None = None


class TransferThread:
    """Runs a transport on a thread of its own. All methods are called on the loop's thread.

    Args:
        transport: handed over; nobody else may call it until `stop`.
        on_notification: called on the loop, in the order of arrival.
        poll_s: the shortest sleep between polls, at least `MIN_POLL_S`.
        on_outcome: called on the loop with the end of every write and read, before its future
            resolves, also when that future was cancelled; for metrics.
        on_failure: called on the loop when the thread crashed: the transport raised what it must
            not. Every write and call has then failed, and all that follow do. Without it, the
            loop's exception handler is told.
    """

    def __init__(  # noqa: PLR0913 - keyword-only wiring, called once
        self,
        transport: Transport,
        *,
        loop: asyncio.AbstractEventLoop,
        on_notification: Callable[[Notification], None],
        poll_s: float,
        clock: Clock,
        on_outcome: Callable[[TransferOutcome], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._on_notification = on_notification
        self._on_outcome = on_outcome
        self._on_failure = on_failure
        self._poll_s = max(poll_s, MIN_POLL_S)
        self._clock = clock
        self._wake = threading.Condition()
        self._jobs: list[_Job] = []  # guarded by _wake, as are the next two
        self._num_watched = 0
        self._is_stopping = False
        self._pending: dict[TransferHandle, _Transfer] = {}  # the thread's own, as are the next two
        self._replies: list[Callable[[], None]] = []
        self._last_event = clock.now()
        self._ended = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def call(self, function: Callable[[Transport], _T]) -> asyncio.Future[_T]:
        """Run `function(transport)` on the thread, in the order of calls.

        The future gets its result or exception; `FabricError` after the thread ended.
        """
        future: asyncio.Future[_T] = self._loop.create_future()

        def job() -> None:
            try:
                result = function(self._transport)
            except Exception as error:  # noqa: BLE001 - it goes to whoever awaits the future
                self._reply(_set_exception, future, error)
            else:
                self._reply(_set_result, future, result)

        self._submit(job, future)
        return future

    def write(
        self, remote: RemoteRegion, local: Sequence[Span], target: Sequence[Span], tag: Tag
    ) -> asyncio.Future[TransferOutcome]:
        """Post a write; the future resolves with its end, and has no deadline.

        Cancelling the future does not cancel the write: its source blocks stay held. An exception
        in it means that nothing was posted (spans that do not match or lie outside their region).
        """

        def post(here: list[Span], there: list[Span]) -> TransferHandle:
            transport = self._transport
            return transport.write(remote, here, there, payload_of(tag, transport))

        return self._post(local, target, post)

    def read(
        self, remote: RemoteRegion, local: Sequence[Span], source: Sequence[Span]
    ) -> asyncio.Future[TransferOutcome]:
        """Post a read; all as for `write`, and cancelling leaves the blocks here held.

        The peer whose region is read must `watch` meanwhile.
        """
        return self._post(
            local, source, lambda here, there: self._transport.read(remote, here, there)
        )

    def watch(self) -> None:
        """An inbound handoff opened: poll for notifications. Balanced by `unwatch`."""
        with self._wake:
            self._num_watched += 1
            self._wake.notify()

    def unwatch(self) -> None:
        """An inbound handoff ended."""
        with self._wake:
            assert self._num_watched > 0, "unwatch without watch"
            self._num_watched -= 1

    async def renew(self, make: Callable[[], Transport]) -> None:
        """Destroy the transport and go on with a new one (which its owner registers anew).

        Afterwards no write reads our memory any more; those pending end as FAILED. `make` runs on
        the thread and may take a while (NIXL: 0.5 s).
        """

        def replace(_: Transport) -> None:
            self._close("the agent was destroyed")
            self._transport = make()

        await self.call(replace)

    async def stop(self, *, destroy: bool = True) -> None:
        """End the thread; pending writes end as FAILED. Idempotent.

        Args:
            destroy: close the transport too, on its thread; else it is the caller's again, and its
                writes may still read our memory.
        """
        if self._thread.ident is not None:
            if not self._is_stopping:
                self._ask_to_stop(destroy=destroy)
            await asyncio.shield(self._ended)
            self._thread.join()
        if destroy:
            self._transport.close()  # again at most, unless the thread crashed or never ran

    # --- shared -----------------------------------------------------------------------------------

    def _post(
        self, local: Sequence[Span], remote: Sequence[Span], post: _Post
    ) -> asyncio.Future[TransferOutcome]:
        future: asyncio.Future[TransferOutcome] = self._loop.create_future()

        def job() -> None:
            started = self._clock.now()
            try:
                here, there = merge_neighbours(local, remote)
                handle = post(here, there)
            except (ValueError, FabricError) as error:
                self._reply(_set_exception, future, error)
                return
            self._pending[handle] = _Transfer(
                future=future,
                started=started,
                posted_s=self._clock.now() - started,
                num_bytes=sum(span.num_bytes for span in here),
                num_descriptors=len(here),
            )

        self._submit(job, future)
        return future

    def _ask_to_stop(self, *, destroy: bool) -> None:
        with self._wake:
            if destroy:
                self._jobs.append(_Job(lambda: self._close(_STOPPED)))
            self._is_stopping = True
            self._wake.notify()

    def _submit(self, job: Callable[[], None], future: asyncio.Future[Any]) -> None:
        if self._is_stopping or self._ended.done():
            future.set_exception(FabricError(_STOPPED))
            return
        with self._wake:
            self._jobs.append(_Job(job, future))
            self._wake.notify()

    # --- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        crash: Exception | None = None
        try:
            while self._iterate():
                pass
            self._fail_pending(_STOPPED)
        except Exception as error:  # noqa: BLE001 - reported by `_end` below
            crash = error
            self._fail_pending(f"the transfer thread failed: {error!r}")
        self._reply(self._end, crash)
        self._flush()

    def _iterate(self) -> bool:
        """Wait until there is something to do, do it, deliver. Return whether to go on."""
        jobs, is_watched, is_stopping = self._next_round()
        for job in jobs:
            job.run()
        self._poll_transfers()
        if is_watched or self._pending:
            for notification in self._transport.notifications():
                self._reply(self._on_notification, notification)
        if jobs or self._replies:
            self._last_event = self._clock.now()
        self._flush()
        return not is_stopping

    def _next_round(self) -> tuple[list[_Job], bool, bool]:
        with self._wake:
            if not self._jobs and not self._is_stopping:
                is_polling = bool(self._pending or self._num_watched)
                quiet_s = self._clock.now() - self._last_event
                pause = pause_s(quiet_s, self._poll_s, is_transferring=bool(self._pending))
                self._wake.wait(pause if is_polling else None)
            jobs, self._jobs = self._jobs, []
            return jobs, self._num_watched > 0, self._is_stopping

    def _poll_transfers(self) -> None:
        for handle in list(self._pending):
            poll = self._transport.poll(handle)
            if poll.state is not TransferState.PENDING:
                self._finish(handle, poll)

    def _finish(self, handle: TransferHandle, poll: Poll) -> None:
        transfer = self._pending.pop(handle)
        outcome = transfer.outcome(poll, self._clock.now(), self._transport.health().transport)
        if self._on_outcome is not None:
            self._reply(self._on_outcome, outcome)
        self._reply(_set_result, transfer.future, outcome)

    def _fail_pending(self, reason: str) -> None:
        for handle in list(self._pending):
            self._finish(handle, Poll(TransferState.FAILED, reason))

    def _close(self, reason: str) -> None:
        self._transport.close()
        self._fail_pending(reason)

    def _reply(self, function: Callable[..., None], *args: object) -> None:
        self._replies.append(lambda: function(*args))

    def _flush(self) -> None:
        """Deliver all replies of one round with one wake-up of the loop."""
        if not self._replies:
            return
        replies, self._replies = self._replies, []
        try:
            self._loop.call_soon_threadsafe(self._deliver, replies)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            self._abandon()

    def _abandon(self) -> None:
        """The loop was closed without `stop`: nobody is left to tell; write nothing any more."""
        self._pending.clear()
        self._transport.close()
        with self._wake:
            self._is_stopping = True

    # --- back on the loop -------------------------------------------------------------------------

    def _deliver(self, replies: list[Callable[[], None]]) -> None:
        for reply in replies:
            try:
                reply()
            except Exception as error:  # noqa: BLE001 - one callback's fault must not lose the rest
                message = "a callback of the transfer thread failed"
                self._loop.call_exception_handler({"message": message, "exception": error})

    def _end(self, crash: Exception | None) -> None:
        with self._wake:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            if job.future is not None:
                _set_exception(job.future, FabricError("the transfer thread failed"))
        self._ended.set_result(None)
        if crash is None:
            return
        if self._on_failure is not None:
            self._on_failure(crash)
            return
        message = "the transfer thread failed"
        self._loop.call_exception_handler({"message": message, "exception": crash})


def pause_s(quiet_s: float, poll_s: float, *, is_transferring: bool) -> float:
    """Return the seconds to sleep between two polls.

    Args:
        quiet_s: since the last event.
        is_transferring: whether a write or read of our own is under way.
    """
    if is_transferring and quiet_s < TRANSFER_S:
        return poll_s
    return min(max(poll_s, BACKOFF_SHARE * quiet_s), MAX_BACKOFF * poll_s)


def payload_of(tag: Tag, transport: Transport) -> bytes:
    """Return what the write carries."""
    return tag(transport) if callable(tag) else tag


def _set_result(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
