"""What the HTTP layer hands to dispatch, and what it gets back: one stream of token updates."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from core.ids import RequestId, WorkerId
from core.lifetime import Lifetime, RequestTrace
from core.messages import WorkerOrder
from core.request import EngineRequest, PromptLogprobs, TokenUpdate


class Disaggregate(enum.StrEnum):
    """The `x-dovetail-disaggregate` header."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class GenerateRequest(msgspec.Struct, frozen=True):
    """A validated, tokenized request with its seed drawn.

    Attributes:
        request: what the worker gets.
        timeout_s: time it has in all.
        disaggregate: the debug header's wish.
    """

    request: EngineRequest
    timeout_s: float
    disaggregate: Disaggregate = Disaggregate.AUTO


class TokenStream(Protocol):
    """One request on its way. Iterate to its end, or abort; both free it everywhere.

    Iterating yields, per arrival, the updates of all samples that came together: contiguous per
    sample, nothing repeated, nothing lost, whatever retries happened below. It raises
    `core.errors.RequestError` when the request cannot be finished (before or after first tokens).
    """

    @property
    def lifetime(self) -> Lifetime:
        """The router's stamps; dispatch stamps DISPATCHED and FIRST_TOKEN."""
        ...

    @property
    def trace(self) -> RequestTrace | None:
        """The path, known at the latest with the last update."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprobs]:
        """The prompt's log-probabilities where they were asked for, in order: all of them once the
        first update was yielded."""
        ...

    def __aiter__(self) -> AsyncIterator[Sequence[TokenUpdate]]:
        """Yield updates until every sample has its finish reason."""
        ...

    def abort(self) -> None:
        """The client is gone, or has all it wants; idempotent."""
        ...

    def finish_sample(self, sample_index: int) -> None:
        """A stop string ended this sample: take no more of it, and free it at the worker when it
        was
        the last one running."""
        ...


class ServedModel(msgspec.Struct, frozen=True):
    """What the workers serve, as far as the API must know it."""

    name: str
    max_model_len: int
    block_size: int
    model_fingerprint: str


class Dispatcher(Protocol):
    """The router's inner half."""

    def served_model(self) -> ServedModel | None:
        """Return the model of the live workers, None while there is none."""
        ...

    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        ...

    def start(self, request: GenerateRequest, lifetime: Lifetime) -> TokenStream:
        """Begin; returns at once. No other request may ever have had its `RequestId`.

        Raises:
            RequestError: 503 when no worker can serve it (Retry-After), 429 when all refuse.
        """
        ...

    def num_requests(self) -> int:
        """Return requests in flight."""
        ...

    def cluster_status(self) -> dict[str, object]:
        """Return what `/status` shows (workers, blocks by state, requests by state), JSON-ready."""
        ...

    def order(self, worker_id: WorkerId, order: WorkerOrder, *, is_forced: bool = False) -> None:
        """Send a worker an operator's order.

        Args:
            is_forced: even if no request could be served without it.

        Raises:
            RequestError: 404 where no such worker is known, 503 where it cannot be reached now, 409
                where requests could be served no longer.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Abort by id; unknown ids are ignored."""
        ...
