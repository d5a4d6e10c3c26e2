"""A dispatcher without workers: each request's updates come from a script that the test writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from core.errors import RequestError
from core.ids import RequestId, WorkerId
from core.lifetime import Lifetime, PrefillDecision, RequestTrace, Stamp
from core.messages import WorkerOrder
from core.request import (
    EngineRequest,
    FinishReason,
    PromptLogprobs,
    TokenLogprobs,
    TokenUpdate,
)
from router.dispatch.interface import GenerateRequest, ServedModel
from router.text.text_model import TextModel

Script = Callable[[EngineRequest], AsyncIterator[Sequence[TokenUpdate]]]

TRACE = RequestTrace(
    decode_worker="decode-0",
    decision=PrefillDecision.DISAGGREGATED,
    prefill_worker="prefill-0",
    cached_tokens=3,
    blocks_transferred=2,
    blocks_reused_decode=1,
    bytes_transferred=737280,
    prefill_s=0.25,
    reservation_wait_s=0.5,
)


class ScriptedStream:
    """Plays one script; after an abort nothing comes any more."""

    def __init__(self, owner: ScriptedDispatcher, request: EngineRequest, life: Lifetime) -> None:
        self._owner = owner
        self._request = request
        self._updates = owner.script(request)
        self._lifetime = life
        self.trace: RequestTrace | None = None

    @property
    def lifetime(self) -> Lifetime:
        return self._lifetime

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprobs]:
        return prompt_scores(self._request)

    def __aiter__(self) -> AsyncIterator[Sequence[TokenUpdate]]:
        return self

    async def __anext__(self) -> Sequence[TokenUpdate]:
        updates = await anext(self._updates)
        self.trace = TRACE
        return updates

    def abort(self) -> None:
        self._owner.cancel(self._request.request_id)

    def finish_sample(self, sample_index: int) -> None:
        self._owner.finished_samples.append(sample_index)


class ScriptedDispatcher:
    """Implements `router.dispatch.interface.Dispatcher`.

    Attributes:
        started: what came, in order.
        aborted: ids that were aborted (ended requests too: aborting those is harmless).
    """

    def __init__(self, script: Script, *, max_model_len: int = 512) -> None:
        self.script = script
        self.model: ServedModel | None = ServedModel("smol", max_model_len, 16, "f" * 32)
        self.ready = True
        self.refusal: RequestError | None = None
        self.started: list[GenerateRequest] = []
        self.aborted: list[RequestId] = []
        self.finished_samples: list[int] = []
        self.orders: list[tuple[WorkerId, WorkerOrder]] = []
        self.forced: list[bool] = []

    def served_model(self) -> ServedModel | None:
        return self.model

    def is_ready(self) -> bool:
        return self.ready

    def start(self, request: GenerateRequest, lifetime: Lifetime) -> ScriptedStream:
        if self.refusal is not None:
            raise self.refusal
        assert request.request.request_id not in self._live(), "ids must be unique"
        lifetime.stamp(Stamp.DISPATCHED, lifetime.at(Stamp.ARRIVED) or 0.0)
        self.started.append(request)
        return ScriptedStream(self, request.request, lifetime)

    def _live(self) -> set[RequestId]:
        return {one.request.request_id for one in self.started} - set(self.aborted)

    def num_requests(self) -> int:
        return len(self._live())

    def cluster_status(self) -> dict[str, object]:
        return {"workers": [{"id": "decode-0", "role": "decode"}], "requests": {"running": 0}}

    def order(self, worker_id: WorkerId, order: WorkerOrder, *, is_forced: bool = False) -> None:
        self.orders.append((worker_id, order))
        self.forced.append(is_forced)

    def cancel(self, request_id: RequestId) -> None:
        if request_id not in self.aborted:
            self.aborted.append(request_id)


def prompt_scores(request: EngineRequest) -> list[PromptLogprobs]:
    """Return two parts, if it asks: token i has -i, its rank is i, and the alternatives are tokens
    19 and 20."""
    wanted, last = request.sampling.prompt_logprobs, len(request.prompt)
    if wanted is None:
        return []
    return [
        PromptLogprobs(
            start=places.start,
            chosen=tuple(-float(place) for place in places),
            ranks=tuple(places),
            num_top=min(wanted, 2),
            top_ids=(19, 20)[:wanted] * len(places),
            top=(-0.5, -0.75)[:wanted] * len(places),
        )
        for places in (range(1, min(3, last)), range(3, last))
        if places
    ]


def updates_of(
    request: EngineRequest,
    token_ids: Sequence[int],
    *,
    sample_index: int = 0,
    finish: FinishReason = FinishReason.STOP,
) -> list[TokenUpdate]:
    """Return one update a token; the last one ends the sample."""
    wanted = request.sampling.logprobs
    updates: list[TokenUpdate] = []
    for at, token_id in enumerate(token_ids):
        tops = (token_id, 19)[:wanted] if wanted else ()
        entry = TokenLogprobs(-0.5, tops, (-0.5, float("-inf"))[: len(tops)])
        updates.append(
            TokenUpdate(
                request.request_id,
                sample_index,
                1,
                at,
                (token_id,),
                logprobs=() if wanted is None else (entry,),
                finish_reason=finish if at == len(token_ids) - 1 else None,
            )
        )
    return updates


def saying(text: TextModel, *sentences: str) -> Script:
    """Script: sample i says sentence i (the last one for those beyond) and EOS, cut to
    `max_tokens`; all samples' tokens of one step come together."""

    async def script(request: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        per_sample: list[list[TokenUpdate]] = []
        for index in range(request.sampling.n):
            sentence = sentences[min(index, len(sentences) - 1)]
            ids = [*text.encode(sentence, add_special_tokens=False), *text.eos_token_ids]
            cut = len(ids) > request.sampling.max_tokens
            finish = FinishReason.LENGTH if cut else FinishReason.STOP
            kept = ids[: request.sampling.max_tokens]
            per_sample.append(updates_of(request, kept, sample_index=index, finish=finish))
        for step in range(max(map(len, per_sample))):
            yield [updates[step] for updates in per_sample if step < len(updates)]

    return script


def playing(*batches: Iterable[TokenUpdate] | RequestError) -> Script:
    """Script: these batches, whatever was asked; an error is raised in its place."""

    async def script(_: EngineRequest) -> AsyncIterator[Sequence[TokenUpdate]]:
        for batch in batches:
            if isinstance(batch, RequestError):
                raise batch
            yield list(batch)

    return script
