"""All that the dispatcher keeps of one request in flight."""

from __future__ import annotations

from collections.abc import Sequence

from core.block_hash import BlockHash
from core.request import EngineRequest
from router.dispatch.interface import Disaggregate, GenerateRequest
from router.dispatch.request_state import RequestState
from router.dispatch.token_stream import RequestStream
from router.dispatch.worker_link import WorkerLink
from router.dispatch.worker_table import ModelKey
from router.policy.decision import Decision
from router.policy.views import RequestView

_DISAGGREGATE = {Disaggregate.ALWAYS: True, Disaggregate.NEVER: False, Disaggregate.AUTO: None}


class LiveRequest:
    """The request, its machine, its stream to the client, and where it runs now.

    Attributes:
        link: where the current dispatch went; None while it waits.
        decision: of the current dispatch.
        sent_at, first_token_at: of the first dispatch and its first token; None until then, and the
            latter for good once another dispatch was needed: it would say nothing of a prediction.
        asked_to_move: the last dispatch whose worker was asked to stop it, for another to go on.
    """

    __slots__ = (
        "_disaggregate",
        "asked_to_move",
        "deadline",
        "decision",
        "first_token_at",
        "hashes",
        "link",
        "model",
        "request",
        "sent_at",
        "state",
        "stream",
    )

    def __init__(
        self,
        generate: GenerateRequest,
        state: RequestState,
        stream: RequestStream,
        *,
        deadline: float,
        model: ModelKey,
        hashes: Sequence[BlockHash],
    ) -> None:
        self.request: EngineRequest = generate.request
        self.state = state
        self.stream = stream
        self.deadline = deadline
        self.model = model
        self.hashes = hashes
        self.link: WorkerLink | None = None
        self.decision: Decision | None = None
        self.sent_at: float | None = None
        self.first_token_at: float | None = None
        self.asked_to_move = 0
        self._disaggregate = _DISAGGREGATE[generate.disaggregate]

    @property
    def num_attempts(self) -> int:
        """Dispatches so far, and the tries at a prefill within the last, as far as its worker has
        told of them."""
        trace = self.stream.trace
        return max(self.state.num_dispatches, 0 if trace is None else trace.attempt)

    def view(self) -> RequestView:
        """Return what the policy sees of it now."""
        num_done = self.state.num_output_tokens
        return RequestView(
            num_tokens=len(self.request.prompt),
            max_tokens=max(1, self.request.sampling.max_tokens - num_done),
            num_forced=num_done,
            disaggregate=self._disaggregate,
        )
