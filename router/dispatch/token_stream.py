"""One request's updates on their way to its HTTP handler: many updates a wake-up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from core.errors import RequestError
from core.ids import RequestId
from core.lifetime import Lifetime, RequestTrace
from core.request import PromptLogprobs, TokenUpdate
from router.dispatch.update_backlog import UpdateBacklog


class RequestStream:
    """Implements `router.dispatch.interface.TokenStream`; fed by the dispatcher.

    What was not read yet is kept compactly, however slow the reader: at most `max_tokens` a sample.
    """

    def __init__(
        self,
        request_id: RequestId,
        lifetime: Lifetime,
        *,
        on_abort: Callable[[RequestId], None],
        on_finish_sample: Callable[[RequestId, int], None],
    ) -> None:
        self.request_id = request_id
        self._lifetime = lifetime
        self._on_abort = on_abort
        self._on_finish_sample = on_finish_sample
        self._updates = UpdateBacklog()
        self._has_updates = False  # asked several times a token, so not of the backlog
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False
        self._error: RequestError | None = None
        self._trace: RequestTrace | None = None
        self._num_dispatches = 0

    @property
    def lifetime(self) -> Lifetime:
        """The router's stamps."""
        return self._lifetime

    @property
    def trace(self) -> RequestTrace | None:
        """The path; None until the worker told it."""
        return self._trace

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprobs]:
        """What came of the prompt's log-probabilities, in order."""
        return self._prompt_logprobs

    @property
    def error(self) -> RequestError | None:
        """What ended it, if it failed."""
        return self._error

    @property
    def num_updates(self) -> int:
        """Updates that were not read yet."""
        return len(self._updates)

    def __aiter__(self) -> AsyncIterator[Sequence[TokenUpdate]]:
        """Iterate over the updates, all that came together at a time."""
        return self

    async def __anext__(self) -> Sequence[TokenUpdate]:
        """Return what came since the last call; wait for it where there is nothing.

        May be cancelled and called again: nothing is lost by that.

        Raises:
            RequestError: the request cannot be finished; all updates before were returned.
        """
        while not self._has_updates:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                raise StopAsyncIteration
            # A future of its own, not an Event: this is awaited once a token.
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_updates = False
        return self._updates.take()

    def abort(self) -> None:
        """End it everywhere; idempotent."""
        self._on_abort(self.request_id)

    def finish_sample(self, sample_index: int) -> None:
        """Take no more of one sample; idempotent."""
        self._on_finish_sample(self.request_id, sample_index)

    def put(self, update: TokenUpdate) -> None:
        """Append one update and wake the reader."""
        self._updates.put(update)
        self._has_updates = True
        self._wake()

    def put_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Append a part; it wakes nobody, since a token follows."""
        self._prompt_logprobs.append(logprobs)

    def end(self, error: RequestError | None) -> None:
        """Let the reader come to the end, or to an error, after what is there."""
        self._has_ended = True
        self._error = error
        self._wake()

    def report(self, trace: RequestTrace, num_dispatches: int) -> None:
        """Take a worker's report.

        `cached_tokens` stay those of the first report (see `RequestTrace`). `attempt` counts the
        dispatches before and the worker's own tries.
        """
        if self._trace is not None and num_dispatches != self._num_dispatches:
            trace = msgspec.structs.replace(trace, cached_tokens=self._trace.cached_tokens)
        self._num_dispatches = num_dispatches
        if num_dispatches > 1:
            trace = msgspec.structs.replace(trace, attempt=num_dispatches - 1 + trace.attempt)
        self._trace = trace

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
