"""The cost model: TTFT and TPOT of a request on a pair of workers, or on one alone.

    TTFT = prefill queue + compute of the tokens that prefill lacks
         + the part of the transfer of the blocks that decode lacks which compute does not hide
         + decode admission
    TPOT = the decode step after this request and those on their way have joined

Prefill's cache hits shorten compute, decode's shorten the transfer. Speeds are the workers' own
measurements (`WorkerLoad`); `Speeds` stands in until there are any.
"""

from __future__ import annotations

import msgspec

from core.messages import WorkerLoad
from router.policy.views import PolicySettings, RequestView, WorkerView

_FEW_PREEMPTIONS = 0.1
"""Below, the last one is so long ago that it says nothing about the blocks that are free now."""


class Speeds(msgspec.Struct, frozen=True):
    """Stand-ins until a worker has measured itself: a small model on two CPU cores.

    Attributes:
        prefill_tokens_per_s: prompt tokens computed a second.
        decode_step_s: a step with one sequence.
        transfer_bytes_per_s: fabric writes.
        handoff_s: two RPC hops, posting and the notification, beyond the bytes themselves.
        step_growth: a step's share that each further sequence adds to that of one (a native kernel
            took 5.8, 14.8 and 46 ms at batch 1, 8 and 32).
    """

    prefill_tokens_per_s: float = 1000.0
    decode_step_s: float = 0.02
    transfer_bytes_per_s: float = 1e9
    handoff_s: float = 0.004
    step_growth: float = 0.12


class PrefillTerms(msgspec.Struct, frozen=True):
    """What a prefill worker adds to TTFT.

    Attributes:
        ready_s: queue and compute.
        compute_s: compute alone, which hides the transfer of all but the last chunk.
        bytes_per_s: of its writes.
    """

    ready_s: float
    compute_s: float
    bytes_per_s: float


class DecodeTerms(msgspec.Struct, frozen=True):
    """What a decode worker adds.

    Attributes:
        admission_s: waiting for blocks, then for the step that takes the sequence in.
        tpot_s: after it joined.
        missing_bytes: of prompt blocks that it lacks.
        tail_bytes: of those, what the last chunk brings: sent after all compute.
    """

    admission_s: float
    tpot_s: float
    missing_bytes: int
    tail_bytes: int


def num_prompt_blocks(request: RequestView, block_size: int) -> int:
    """Return the blocks that hold the prompt, a partial tail included."""
    return -(-request.num_tokens // block_size)


def reusable_blocks(request: RequestView, worker: WorkerView, hit_blocks: int) -> int:
    """Return the hits that count: the engine always computes the last prompt token."""
    return min(hit_blocks, (request.num_tokens - 1) // worker.block_size) if hit_blocks else 0


def uncached_tokens(request: RequestView, worker: WorkerView, hit_blocks: int) -> int:
    """Return the prompt tokens that this worker would have to compute, at least 1."""
    return request.num_tokens - worker.block_size * reusable_blocks(request, worker, hit_blocks)


def prefill_terms(
    request: RequestView, worker: WorkerView, hit_blocks: int, speeds: Speeds
) -> PrefillTerms:
    """Return what prefilling on `worker` takes."""
    compute_s = uncached_tokens(request, worker, hit_blocks) / _prefill_speed(worker, speeds)
    return PrefillTerms(
        ready_s=_queue_s(worker, speeds) + compute_s,
        compute_s=compute_s,
        bytes_per_s=worker.load.transfer_bytes_per_s or speeds.transfer_bytes_per_s,
    )


def decode_terms(
    request: RequestView,
    worker: WorkerView,
    hit_blocks: int,
    settings: PolicySettings,
    speeds: Speeds,
) -> DecodeTerms:
    """Return what decoding on `worker` takes when the prompt comes over the fabric."""
    missing = num_prompt_blocks(request, worker.block_size) - reusable_blocks(
        request, worker, hit_blocks
    )
    tail = min(missing, -(-settings.chunk_tokens // worker.block_size))
    return DecodeTerms(
        admission_s=_admission_s(request, worker, missing, settings, speeds),
        tpot_s=_step_s(worker, speeds),
        missing_bytes=missing * worker.block_bytes,
        tail_bytes=tail * worker.block_bytes,
    )


def pair_ttft_s(prefill: PrefillTerms, decode: DecodeTerms, speeds: Speeds) -> float:
    """Return the TTFT of a handoff; seconds."""
    exposed_bytes = max(
        float(decode.tail_bytes), decode.missing_bytes - prefill.compute_s * prefill.bytes_per_s
    )
    exposed_s = exposed_bytes / prefill.bytes_per_s
    return prefill.ready_s + exposed_s + speeds.handoff_s + decode.admission_s


def alone_ttft_s(
    request: RequestView, worker: WorkerView, hit_blocks: int, decode: DecodeTerms, speeds: Speeds
) -> float:
    """Return the TTFT where `worker` computes the prompt itself; seconds."""
    compute_s = uncached_tokens(request, worker, hit_blocks) / _prefill_speed(worker, speeds)
    return _queue_s(worker, speeds) + compute_s + decode.admission_s


def interference_s(
    request: RequestView, worker: WorkerView, hit_blocks: int, speeds: Speeds
) -> float:
    """Return what local prefill takes from the sequences running there: its compute, once."""
    if worker.load.num_running == 0:
        return 0.0
    return uncached_tokens(request, worker, hit_blocks) / _prefill_speed(worker, speeds)


def _prefill_speed(worker: WorkerView, speeds: Speeds) -> float:
    return worker.load.prefill_tokens_per_s or speeds.prefill_tokens_per_s


def _queue_s(worker: WorkerView, speeds: Speeds) -> float:
    queued = worker.load.waiting_prompt_tokens + worker.pending_tokens
    return queued / _prefill_speed(worker, speeds)


def single_step_s(load: WorkerLoad, speeds: Speeds) -> float | None:
    """Return the measured step, scaled to one sequence; None until there is one."""
    if load.decode_step_s is None:
        return None
    return load.decode_step_s / (1.0 + speeds.step_growth * max(0, load.num_running - 1))


def _step_s(worker: WorkerView, speeds: Speeds) -> float:
    """A step is affine in its batch: scale the measured one to the sequences that will be there."""
    running = worker.load.num_running
    joining = running + worker.load.num_receiving + worker.load.num_waiting
    joined = joining + worker.pending_requests + 1
    base_s = single_step_s(worker.load, speeds) or speeds.decode_step_s
    return base_s * (1.0 + speeds.step_growth * (joined - 1))


def _admission_s(
    request: RequestView,
    worker: WorkerView,
    missing_blocks: int,
    settings: PolicySettings,
    speeds: Speeds,
) -> float:
    """One step where blocks are free; else as long as the requests ahead take to be served, at the
    rate at which running sequences finish (one in `expected_output_tokens` steps each).

    Where sequences lose their blocks, free ones are no room: they were just taken from somebody,
    who comes again before this request.
    """
    load = worker.load
    step_s = load.decode_step_s or speeds.decode_step_s
    evictable = load.blocks_free + load.blocks_cached
    pending_blocks = worker.pending_requests * num_prompt_blocks(request, worker.block_size)
    fits = load.blocks_total == 0 or missing_blocks + pending_blocks <= evictable
    preempted = worker.recent_preemptions
    if fits and load.num_waiting == 0 and preempted < _FEW_PREEMPTIONS:
        return step_s
    ahead = load.num_waiting + worker.pending_requests + preempted + 1
    finish_every_s = settings.expected_output_tokens * step_s / max(1, load.num_running)
    return step_s + ahead * finish_every_s
