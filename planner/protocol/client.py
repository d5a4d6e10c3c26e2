"""Clients: they start requests at a router, read their streams, leave, and judge every token."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence

from core.errors import RequestError
from core.ids import RequestId
from core.lifetime import Lifetime
from core.request import EngineRequest, FinishReason, TokenUpdate
from engine.executor.mock_tokens import expected_tokens
from engine.token_rules import end_of
from planner.protocol.process import Process
from planner.protocol.replica import VOCABULARY
from planner.protocol.scenario import RequestPlan
from router.dispatch.dispatcher import RouterDispatcher
from router.dispatch.interface import GenerateRequest
from router.dispatch.token_stream import RequestStream

TIMEOUT_S = 60.0
"""Time of a request; longer than any run, so that none ends by it."""


_RETRY_S = 0.2


class Ending(enum.StrEnum):
    """How a request ended for its client.

    DONE     every sample has its finish reason
    LEFT     the client left
    REFUSED  with a typed error, before or after tokens
    LOST     its router died
    """

    DONE = "done"
    LEFT = "left"
    REFUSED = "refused"
    LOST = "lost"


class Client:
    """One request, and what its client saw.

    Args:
        number: names it.
        violated: told the name of an invariant, and what happened.
    """

    def __init__(
        self, number: int, plan: RequestPlan, violated: Callable[[str, str], None]
    ) -> None:
        self.number = number
        self.plan = plan
        self.ending: Ending | None = None
        self.error: RequestError | None = None
        self.expected = [
            expected_tokens(plan.prompt, plan.sampling, vocab_size=VOCABULARY, sample_index=index)
            for index in range(plan.sampling.n)
        ]
        self._violated = violated
        self._num_received = [0] * plan.sampling.n
        self._finished: set[int] = set()
        self._stopped: set[int] = set()
        self._router: Process | None = None
        self._stream: RequestStream | None = None

    def connected(self, router: Process) -> None:
        """A router has its connection."""
        self._router = router

    async def run(self, dispatcher: RouterDispatcher) -> None:
        """Send the request, and read to the end."""
        plan = self.plan
        request = EngineRequest(
            RequestId(f"r{self.number}~{self._router}.{self.number}"),
            plan.prompt,
            plan.sampling,
            priority=plan.priority,
        )
        generate = GenerateRequest(request, TIMEOUT_S, plan.disaggregate)
        try:
            stream = self._stream = await _start(dispatcher, generate)
            async for updates in stream:
                self._take(stream, updates)
        except RequestError as error:
            self.error = error
            self.ending = self.ending or Ending.REFUSED
            return
        if self.ending is None:
            self.ending = Ending.DONE
            self._check_whole()

    def leave(self) -> None:
        """Disconnect, wherever the request stands."""
        if self._stream is not None and self.ending is None:
            self.ending = Ending.LEFT
            self._stream.abort()

    def router_died(self, router: Process) -> None:
        """A router is gone: if it was this client's, the connection broke."""
        if self._router is router and self.ending is None:
            self.ending = Ending.LOST

    def _take(self, stream: RequestStream, updates: Sequence[TokenUpdate]) -> None:
        for update in updates:
            self._judge(update)
        num_tokens = sum(self._num_received)
        leaves_after, stops_after = self.plan.leaves_after, self.plan.stops_after
        if leaves_after is not None and num_tokens > leaves_after:
            self.leave()
        elif stops_after is not None and self._num_received[0] >= stops_after:
            self._stopped.add(0)
            stream.finish_sample(0)

    def _judge(self, update: TokenUpdate) -> None:
        index, known = update.sample_index, self._num_received[update.sample_index]
        name = f"request {self.number} sample {index}"
        if update.start_index != known:
            self._violated("contiguous", f"{name}: index {update.start_index} after {known} tokens")
            return
        if index in self._finished:
            self._violated("contiguous", f"{name}: news after its end")
            return
        right = self.expected[index][known : known + len(update.token_ids)]
        if update.token_ids != right:
            self._violated("oracle", f"{name}: {update.token_ids} at {known}, not {right}")
            return
        self._num_received[index] += len(update.token_ids)
        if update.finish_reason is not None:
            self._finished.add(index)
            self._check_reason(index, name, update.finish_reason)

    def _check_reason(self, index: int, name: str, reason: FinishReason) -> None:
        received = self.expected[index][: self._num_received[index]]
        if self.ending is not Ending.LEFT and end_of(received, self.plan.sampling) is not reason:
            self._violated("oracle", f"{name}: ended by {reason} after {len(received)} tokens")

    def _check_whole(self) -> None:
        for index, expected in enumerate(self.expected):
            is_whole = self._num_received[index] == len(expected) and index in self._finished
            if index not in self._stopped and not is_whole:
                text = f"{self._num_received[index]} of {len(expected)} tokens at the end"
                self._violated("contiguous", f"request {self.number} sample {index}: {text}")


async def _start(dispatcher: RouterDispatcher, generate: GenerateRequest) -> RequestStream:
    """Start a request; a router that knows no worker yet is asked again, as its answer says."""
    while True:
        try:
            return dispatcher.start(generate, Lifetime())
        except RequestError as error:
            if error.code != "no_worker":
                raise
            await asyncio.sleep(_RETRY_S)
