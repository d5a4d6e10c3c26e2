"""Every way in which a request could run now, each with its predicted cost.

An option is a decode worker with a prefill worker, or a worker alone. Options that a rule forbids
(header, strict mode, layouts that differ, no path for KV) are never made, so the choice need not
know the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from core.ids import WorkerId
from core.worker_record import Role
from router.policy.calibration import Calibration
from router.policy.cost import (
    DecodeTerms,
    PrefillTerms,
    Speeds,
    alone_ttft_s,
    decode_terms,
    interference_s,
    pair_ttft_s,
    prefill_terms,
    reusable_blocks,
    uncached_tokens,
)
from router.policy.decision import Reason
from router.policy.views import PolicySettings, RequestView, WorkerView

_NEVER_HANDED_OFF = (Reason.NEVER, Reason.FALLBACK, Reason.LOCAL_HIT)


class Option(NamedTuple):
    """One way; times are seconds and not calibrated, except `cost_s`, by which options compare:
    TTFT, the expected output's TPOT, and what others lose."""

    cost_s: float
    ttft_s: float
    tpot_s: float
    worker: WorkerView
    prefill: WorkerView | None
    reason: Reason


class Inputs(NamedTuple):
    """All that a decision reads besides the workers."""

    request: RequestView
    hits: Mapping[WorkerId, int]
    settings: PolicySettings
    speeds: Speeds
    calibration: Calibration


def options(
    inputs: Inputs, workers: Sequence[WorkerView], prefills: Sequence[WorkerView]
) -> list[Option]:
    """Return all options.

    Args:
        inputs: the request and what is known besides the workers.
        workers: of role decode or both, that may be chosen and can hold the request.
        prefills: of role prefill, that may be asked.
    """
    ready = [(worker, _prefill_terms(inputs, worker)) for worker in prefills]
    found: list[Option] = []
    for worker in workers:
        terms = _decode_terms(inputs, worker)
        if worker.role is Role.BOTH:
            if inputs.request.disaggregate is not True:
                found.append(_alone(inputs, worker, terms, Reason.COLOCATED))
            continue
        peers = [(peer, ahead) for peer, ahead in ready if may_pair(peer, worker)]
        found.extend(_on_decode(inputs, worker, terms, peers))
    return found


def may_pair(prefill: WorkerView, decode: WorkerView) -> bool:
    """Return whether KV can go from one to the other, as far as is known."""
    is_barred = prefill.load.is_unpaired or decode.load.is_unpaired
    return prefill.layout == decode.layout and not is_barred


def _on_decode(
    inputs: Inputs,
    worker: WorkerView,
    terms: DecodeTerms,
    peers: Sequence[tuple[WorkerView, PrefillTerms]],
) -> Iterator[Option]:
    """Yield the options on one decode worker."""
    local = _local_reason(inputs, worker, has_peers=bool(peers))
    if local is not None:
        yield _alone(inputs, worker, terms, local)
    if local in _NEVER_HANDED_OFF:
        return
    always = inputs.request.disaggregate is True
    reason = Reason.ALWAYS if always else Reason.DISAGGREGATED
    factor = inputs.calibration.handoff_ttft.value
    output_s = _output_s(inputs, terms)
    for peer, ahead in peers:
        ttft_s = pair_ttft_s(ahead, terms, inputs.speeds)
        yield Option(ttft_s * factor + output_s, ttft_s, terms.tpot_s, worker, peer, reason)


def _local_reason(inputs: Inputs, worker: WorkerView, *, has_peers: bool) -> Reason | None:
    """Return why a decode worker may compute the prompt itself, None where it may not."""
    request, settings = inputs.request, inputs.settings
    if request.disaggregate is not None:
        return None if request.disaggregate else Reason.NEVER
    hit_blocks = reusable_blocks(request, worker, inputs.hits.get(worker.worker_id, 0))
    if hit_blocks and hit_blocks == (request.num_tokens - 1) // worker.block_size:
        return Reason.LOCAL_HIT
    if settings.is_strict:
        return None
    if not has_peers:
        return Reason.FALLBACK
    uncached = uncached_tokens(request, worker, hit_blocks)
    is_few = uncached <= settings.local_prefill_tokens
    is_mostly_hit = (
        uncached <= (1.0 - settings.local_hit_share) * request.num_tokens
        and uncached <= settings.chunk_tokens
    )
    return Reason.LOCAL if is_few or is_mostly_hit else None


def _alone(inputs: Inputs, worker: WorkerView, terms: DecodeTerms, reason: Reason) -> Option:
    hit_blocks = inputs.hits.get(worker.worker_id, 0)
    ttft_s = alone_ttft_s(inputs.request, worker, hit_blocks, terms, inputs.speeds)
    cost_s = (
        ttft_s * inputs.calibration.alone_ttft.value
        + _output_s(inputs, terms)
        + interference_s(inputs.request, worker, hit_blocks, inputs.speeds)
    )
    return Option(cost_s, ttft_s, terms.tpot_s, worker, None, reason)


def _output_s(inputs: Inputs, terms: DecodeTerms) -> float:
    """Return the time of the tokens after the first."""
    expected = min(inputs.request.max_tokens, inputs.settings.expected_output_tokens)
    return (expected - 1) * terms.tpot_s * inputs.calibration.tpot.value


def _prefill_terms(inputs: Inputs, worker: WorkerView) -> PrefillTerms:
    hit_blocks = inputs.hits.get(worker.worker_id, 0)
    return prefill_terms(inputs.request, worker, hit_blocks, inputs.speeds)


def _decode_terms(inputs: Inputs, worker: WorkerView) -> DecodeTerms:
    hit_blocks = inputs.hits.get(worker.worker_id, 0)
    return decode_terms(inputs.request, worker, hit_blocks, inputs.settings, inputs.speeds)
