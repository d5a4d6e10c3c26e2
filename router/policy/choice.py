"""The choice: two random ones among the options near the best, the less busy of them wins.

"Near" keeps several routers, which all see the same loads, from sending to the same best worker at
once; the power of two choices (Mitzenmacher 2001) keeps the random part from being blind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from core.back_off import Dice
from core.ids import WorkerId
from core.messages import PrefillCandidate
from core.worker_record import Role
from router.policy.calibration import Calibration
from router.policy.cost import Speeds, num_prompt_blocks, prefill_terms, uncached_tokens
from router.policy.decision import Decision, Reason, Refusal, RefusalReason
from router.policy.options import Inputs, Option, may_pair, options
from router.policy.unmeasured import PeersSpeeds
from router.policy.views import PolicySettings, RequestView, WorkerView

_PREFILL = Role.PREFILL
"""An enum's members are slow to look up in its class; this is asked of every worker."""

_ALONE_WITHOUT_CANDIDATES = (Reason.LOCAL, Reason.NEVER, Reason.FALLBACK, Reason.COLOCATED)


class Policy:
    """The settings, defaults and calibration that a router's decisions share."""

    def __init__(self, settings: PolicySettings, speeds: Speeds | None = None) -> None:
        self.settings = settings
        self.speeds = speeds or Speeds()
        self.calibration = Calibration()
        self._peers_speeds = PeersSpeeds(self.speeds)

    def decide(
        self,
        request: RequestView,
        workers: Sequence[WorkerView],
        hits: Mapping[WorkerId, int],
        dice: Dice,
        *,
        avoid: AbstractSet[WorkerId] = frozenset(),
    ) -> Decision | Refusal:
        """Choose where a request runs.

        Args:
            request: what its cost depends on.
            workers: all with an open stream.
            hits: leading prompt blocks that each holds, from the prefix index.
            dice: breaks ties; seeded differently in each router.
            avoid: workers not to send to: they refused or failed this request a moment ago.
        """
        workers = self._peers_speeds.of(workers)
        able = [worker for worker in workers if worker.role is not _PREFILL]
        fitting = [worker for worker in able if _can_hold(request, worker)]
        allowed = [worker for worker in fitting if worker.worker_id not in avoid]
        if not allowed:
            return Refusal(_why_none(able, fitting))
        prefills = self._prefills(request, workers)
        inputs = Inputs(request, hits, self.settings, self.speeds, self.calibration)
        found = options(inputs, _unsuspected(allowed), prefills)
        if not found:
            return Refusal(RefusalReason.NO_PREFILL_WORKER)
        return self._decision(inputs, self._pick(found, dice), prefills)

    def _prefills(self, request: RequestView, workers: Sequence[WorkerView]) -> list[WorkerView]:
        """Return the prefill workers that may be asked; suspects only where there is no way
        without."""
        prefills = [
            worker for worker in workers if worker.role is _PREFILL and _can_hold(request, worker)
        ]
        if self.settings.is_strict:
            return _unsuspected(prefills)
        return [worker for worker in prefills if not worker.is_suspect]

    def _pick(self, found: Sequence[Option], dice: Dice) -> Option:
        best = min(found, key=lambda option: option.cost_s)
        slack = 1.0 + self.settings.near_best
        cost_s, ttft_s = best.cost_s * slack, best.ttft_s * slack
        near = [option for option in found if option.cost_s <= cost_s and option.ttft_s <= ttft_s]
        first = near[int(dice.random() * len(near))]
        second = near[int(dice.random() * len(near))]
        return min(first, second, key=_busyness)

    def _decision(self, inputs: Inputs, option: Option, prefills: Sequence[WorkerView]) -> Decision:
        computing = option.prefill or option.worker
        calibration = self.calibration
        ttft_factor = calibration.ttft(is_handoff=option.reason.is_handoff).value
        candidates = self._candidates(inputs, option, prefills)
        return Decision(
            worker_id=option.worker.worker_id,
            candidates=candidates,
            allow_local=self._allow_local(option.reason, has_candidates=bool(candidates)),
            reason=option.reason,
            predicted_ttft_s=option.ttft_s * ttft_factor,
            predicted_tpot_s=option.tpot_s * calibration.tpot.value,
            raw_ttft_s=option.ttft_s,
            raw_tpot_s=option.tpot_s,
            prefill_tokens=uncached_tokens(
                inputs.request, computing, inputs.hits.get(computing.worker_id, 0)
            ),
        )

    def _allow_local(self, reason: Reason, *, has_candidates: bool) -> bool:
        """A full hit with nobody to ask is computed in strict mode too: that moves no prefill to
        decode, and refusing would keep a request waiting that needs no prefill worker."""
        if reason in _ALONE_WITHOUT_CANDIDATES or not has_candidates:
            return True
        return reason is not Reason.ALWAYS and not self.settings.is_strict

    def _candidates(
        self, inputs: Inputs, option: Option, prefills: Sequence[WorkerView]
    ) -> tuple[PrefillCandidate, ...]:
        """Return whom the decode worker asks: the chosen one, then the others as they get ready."""
        if option.reason in _ALONE_WITHOUT_CANDIDATES:
            return ()
        ready: list[tuple[float, WorkerId, WorkerView]] = []
        for worker in prefills:
            if may_pair(worker, option.worker) and worker is not option.prefill:
                hit_blocks = inputs.hits.get(worker.worker_id, 0)
                terms = prefill_terms(inputs.request, worker, hit_blocks, inputs.speeds)
                ready.append((terms.ready_s, worker.worker_id, worker))
        others = [worker for _, _, worker in sorted(ready, key=lambda entry: entry[:2])]
        chosen = [option.prefill] if option.prefill else []
        return tuple(
            PrefillCandidate(worker.worker_id, worker.boot, worker.address)
            for worker in (chosen + others)[: self.settings.max_candidates]
        )


def _busyness(option: Option) -> tuple[int, float]:
    """Order by requests at work there, then by cost."""
    busy = 0
    for worker in (option.worker, option.prefill):
        if worker is not None:
            load = worker.load
            busy += load.num_running + load.num_waiting + load.num_receiving
            busy += worker.pending_requests
    return busy, option.cost_s


def _unsuspected(workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Leave out suspects, unless all are."""
    return [worker for worker in workers if not worker.is_suspect] or list(workers)


def _can_hold(request: RequestView, worker: WorkerView) -> bool:
    """Whether the worker would accept it: a prefill worker generates one token, others all."""
    total = worker.load.blocks_total
    known = total == 0 or num_prompt_blocks(request, worker.block_size) <= total
    num_generated = 1 if worker.role is _PREFILL else request.max_tokens
    num_tokens = request.num_tokens + request.num_forced + num_generated
    return known and num_tokens <= worker.max_model_len


def _why_none(able: Sequence[WorkerView], fitting: Sequence[WorkerView]) -> RefusalReason:
    if not able:
        return RefusalReason.NO_WORKER
    return RefusalReason.AVOIDED if fitting else RefusalReason.TOO_LONG
