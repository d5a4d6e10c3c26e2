"""Chooses a worker for each dispatch, sends it there, and learns how good the prediction was."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from core.back_off import Dice
from core.block_hash import BlockHash, hash_blocks
from core.clock import Clock
from core.config import Config
from core.ids import WorkerId
from core.lifetime import Stamp
from core.messages import PrefillCandidate, StartRequest
from core.request import EngineRequest
from router.dispatch.interface import ServedModel
from router.dispatch.live_request import LiveRequest
from router.dispatch.metrics import DispatchMetrics
from router.dispatch.request_state import Dispatch, Effect
from router.dispatch.worker_link import WorkerLink
from router.dispatch.worker_table import WorkerTable
from router.policy.choice import Policy
from router.policy.decision import Decision, Refusal
from router.policy.prefix_index import PrefixIndex
from router.policy.views import PolicySettings

_log = logging.getLogger(__name__)


class Placement:
    """The policy, joined to the links.

    Attributes:
        index: which blocks each worker holds; fed by the ledger.
    """

    def __init__(
        self,
        config: Config,
        workers: WorkerTable,
        metrics: DispatchMetrics,
        clock: Clock,
        rng: Dice,
    ) -> None:
        self.index = PrefixIndex()
        self._policy = Policy(_settings(config))
        self._workers = workers
        self._metrics = metrics
        self._clock = clock
        self._rng = rng

    def hashes(self, request: EngineRequest, model: ServedModel) -> list[BlockHash]:
        """Return the prompt's block hashes; none where nothing is indexed to match them with, or
        where its log-probabilities are wanted: then all of it is computed."""
        if not len(self.index) or request.wants_prompt_logprobs:
            return []
        return hash_blocks(
            request.prompt,
            block_size=model.block_size,
            fingerprint=bytes.fromhex(model.model_fingerprint),
            namespace=request.namespace,
        )

    def place(self, live: LiveRequest, dispatch: Dispatch) -> Sequence[Effect]:
        """Choose a worker, send the request there, and tell its machine, which may want more."""
        now = self._clock.now()
        views = self._workers.views(live.model)
        hits = self.index.match(live.hashes)
        decision = self._policy.decide(live.view(), views, hits, self._rng, avoid=dispatch.avoid)
        if isinstance(decision, Refusal):
            return live.state.unplaced(decision.reason, now, self._rng)
        link = self._workers.get(decision.worker_id)
        assert link is not None  # the views are those of the links
        decision = self._with_source(decision, link, dispatch)
        live.decision = decision
        live.stream.lifetime.stamp(Stamp.DISPATCHED, now)
        is_first = live.state.num_dispatches == 0
        live.sent_at = now if is_first else None
        self._join(live, link, decision, now)
        link.send(_start(live, decision, dispatch, now))
        self._metrics.decided(decision.reason, is_first=is_first)
        if _log.isEnabledFor(logging.INFO):
            extra = {"request_id": live.request.request_id}
            _log.info("sent to %s: %s", decision.worker_id, decision.reason, extra=extra)
        return live.state.sent(decision.worker_id, now, is_suspect=link.is_suspect)

    def has_another(self, live: LiveRequest, worker_id: WorkerId) -> bool:
        """Return whether a request could go on at another worker now."""
        views, hits = self._workers.views(live.model), self.index.match(live.hashes)
        decision = self._policy.decide(
            live.view(), views, hits, self._rng, avoid=frozenset({worker_id})
        )
        return isinstance(decision, Decision)

    def _with_source(self, decision: Decision, link: WorkerLink, dispatch: Dispatch) -> Decision:
        """Have a request that moved get its KV from where it ran."""
        source = None if dispatch.source is None else self._workers.get(dispatch.source)
        if source is None or not source.is_open or source.record.layout != link.record.layout:
            return decision
        record = source.record
        first = PrefillCandidate(record.worker_id, record.boot, record.address)
        return msgspec.structs.replace(decision, candidates=(first, *decision.candidates))

    def leave(self, live: LiveRequest) -> None:
        """The request is no longer at its worker."""
        self._forget_pending(live)
        if live.link is not None:
            live.link.requests.discard(live.request.request_id)
            live.link = None

    def first_token(self, live: LiveRequest, now: float) -> None:
        """Its first token came: the prompt is no longer pending; compare TTFT."""
        live.first_token_at = now
        live.stream.lifetime.stamp(Stamp.FIRST_TOKEN, now)
        self._forget_pending(live)
        if live.sent_at is None or live.decision is None:
            return
        decision, actual_s = live.decision, now - live.sent_at
        factor = self._policy.calibration.ttft(is_handoff=decision.reason.is_handoff)
        factor.observe(decision.raw_ttft_s, actual_s)
        self._metrics.ttft_seen(decision.predicted_ttft_s, actual_s)

    def ended(self, live: LiveRequest) -> None:
        """It ended well: compare TPOT, where one worker made all of its tokens."""
        num_steps = live.state.num_output_tokens - 1
        if live.sent_at is None or live.first_token_at is None or live.decision is None:
            return
        if num_steps < 1:
            return
        actual_s = (live.state.progress_at - live.first_token_at) / num_steps
        self._policy.calibration.tpot.observe(live.decision.raw_tpot_s, actual_s)
        self._metrics.tpot_seen(live.decision.predicted_tpot_s, actual_s)

    def _join(self, live: LiveRequest, link: WorkerLink, decision: Decision, now: float) -> None:
        """Count the request at its worker, and its prompt where that will be computed."""
        request_id = live.request.request_id
        live.link = link
        link.requests.add(request_id)
        if not decision.reason.is_handoff:
            link.pending.add(request_id, decision.prefill_tokens, now)
            return
        link.pending.add(request_id, 0, now)
        prefill = self._workers.get(decision.candidates[0].worker_id)
        assert prefill is not None  # candidates are those of links, the source of a move too
        prefill.pending.add(request_id, decision.prefill_tokens, now)

    def _forget_pending(self, live: LiveRequest) -> None:
        if live.decision is None:
            return
        first = [candidate.worker_id for candidate in live.decision.candidates[:1]]
        for worker_id in (live.decision.worker_id, *first):
            link = self._workers.get(worker_id)
            if link is not None:
                link.pending.discard(live.request.request_id)


def _start(live: LiveRequest, decision: Decision, dispatch: Dispatch, now: float) -> StartRequest:
    request = live.request
    if dispatch.outputs:
        request = msgspec.structs.replace(request, outputs=dispatch.outputs)
    return StartRequest(
        request=request,
        dispatch=dispatch.number,
        candidates=decision.candidates,
        remaining_s=max(0.0, live.deadline - now),
        allow_local=decision.allow_local,
    )


def _settings(config: Config) -> PolicySettings:
    return PolicySettings(
        near_best=config.router.near_best,
        local_prefill_tokens=config.router.local_prefill_tokens,
        chunk_tokens=config.engine.chunk_tokens,
        is_strict=config.disaggregation.fallback == "strict",
    )
