"""What the policy sees of a request and of the workers: frozen values, made by the dispatcher or
by a simulator."""

from __future__ import annotations

import msgspec

from core.ids import Boot, WorkerId
from core.messages import WorkerLoad
from core.worker_record import Role


class WorkerView(msgspec.Struct, frozen=True):
    """One worker with an open stream.

    Attributes:
        address: host:port of its gRPC server.
        layout: its KV layout as a summary; only equal ones can hand KV over.
        block_size: tokens a block.
        block_bytes: bytes of one block on this worker.
        max_model_len: tokens of prompt and output that it can hold.
        load: what it said last.
        pending_requests, pending_tokens: requests, and their uncached prompt tokens, sent to it
            that its `load` cannot show yet.
        is_suspect: heartbeats are missing.
        recent_preemptions: sequences that lost their blocks there, less with time.
    """

    worker_id: WorkerId
    boot: Boot
    role: Role
    address: str
    layout: str
    block_size: int
    block_bytes: int
    max_model_len: int
    load: WorkerLoad = WorkerLoad()
    pending_requests: int = 0
    pending_tokens: int = 0
    is_suspect: bool = False
    recent_preemptions: float = 0.0


class RequestView(msgspec.Struct, frozen=True):
    """What the cost of a request depends on.

    Attributes:
        num_tokens: prompt tokens, at least 1.
        max_tokens: tokens that may still be generated.
        num_forced: tokens generated already, on a re-dispatch; computed after the prompt.
        disaggregate: True: always, False: never, None: where it is cheaper.
    """

    num_tokens: int
    max_tokens: int
    num_forced: int = 0
    disaggregate: bool | None = None


class PolicySettings(msgspec.Struct, frozen=True):
    """The policy's knobs; from `core.config`, except where the configuration has none.

    Attributes:
        near_best: share of the best prediction within which options count as equal.
        local_prefill_tokens: uncached tokens up to which decode-local prefill may be chosen.
        local_hit_share: share of the prompt in decode's cache from which the same holds, ...
        chunk_tokens: ... for at most so many uncached tokens (one step's budget, so that the
            running sequences lose one step at most).
        is_strict: a decode worker never computes a prompt by choice or for want of a prefill
            worker.
        expected_output_tokens: weight of TPOT against TTFT, cut to the request's `max_tokens`.
        max_candidates: prefill workers named to the decode worker.
    """

    near_best: float = 0.05
    local_prefill_tokens: int = 32
    local_hit_share: float = 0.9
    chunk_tokens: int = 512
    is_strict: bool = False
    expected_output_tokens: int = 128
    max_candidates: int = 4
