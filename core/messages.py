"""What processes say to each other. Plain values; `control_plane.rpc` puts them into protobuf.

    router -> worker (role decode or both)   StartRequest, AbortRequest, MoveRequest
    router -> worker (any role)              DrainWorker, SwitchRole
    worker -> router                         TokenBatch, PromptScored, PathReport, RequestRefused,
                                             RequestFailed, RequestMoved, WorkerLoad
    decode -> prefill                        PrefillAsk, SettleHandoff
    prefill -> decode                        HandoffProgress, HandoffScored, FirstTokens,
                                             HandoffRefused, HandoffFailed, HandoffSettled

Remaining time crosses, never a deadline: clocks differ between machines.
"""

from __future__ import annotations

import msgspec

from core.ids import BlockId, Boot, HandoffId, RequestId, WorkerId
from core.lifetime import RequestTrace
from core.request import (
    EngineRequest,
    FinishReason,
    PromptLogprobs,
    TokenLogprobs,
    TokenUpdate,
)
from core.worker_record import Role


class PrefillCandidate(msgspec.Struct, frozen=True):
    """A prefill worker that the router suggests, best first."""

    worker_id: WorkerId
    boot: Boot
    address: str  # host:port of its gRPC server


class StartRequest(msgspec.Struct, frozen=True):
    """Router to a worker of role decode or both: own this request.

    Attributes:
        dispatch: the router's count for this request, from 1; echoed in every update.
        candidates: prefill workers to ask in turn; empty means compute the prompt here.
        allow_local: whether the worker may compute the prompt itself once no candidate is left.
        remaining_s: the time that the request has left.
    """

    request: EngineRequest
    dispatch: int
    candidates: tuple[PrefillCandidate, ...]
    remaining_s: float
    allow_local: bool = True


class AbortRequest(msgspec.Struct, frozen=True):
    """Router to worker: end it now, tell nothing more, free everything.

    Attributes:
        sample_index: end this sample alone (a stop string ended it); None ends all.
    """

    request_id: RequestId
    dispatch: int
    sample_index: int | None = None


class MoveRequest(msgspec.Struct, frozen=True):
    """Router to a worker that drains: stop this request, another worker will go on with it. The
    answer is RequestMoved, unless it has ended meanwhile."""

    request_id: RequestId
    dispatch: int


class DrainWorker(msgspec.Struct, frozen=True):
    """Router to worker, an operator's order: take nothing new, finish what runs or hand it over,
    and end.

    Attributes:
        deadline_s: after so long, what still runs is failed over to other workers.
    """

    deadline_s: float


class SwitchRole(msgspec.Struct, frozen=True):
    """Router to worker, an operator's order: finish or hand over what the present role took, then
    take the work of another. The boot stays, and with it the cache."""

    role: Role


class TokenBatch(msgspec.Struct, frozen=True):
    """Worker to router: all tokens of one step on this stream, in one message."""

    updates: tuple[TokenUpdate, ...]


class PromptScored(msgspec.Struct, frozen=True):
    """Worker to router: log-probabilities of a chunk of the prompt, in order and ahead of the first
    token. A receiver takes only the current dispatch, and what it does not have yet."""

    request_id: RequestId
    dispatch: int
    logprobs: PromptLogprobs


class PathReport(msgspec.Struct, frozen=True):
    """Worker to router, ahead of a request's last update: what path it took."""

    request_id: RequestId
    dispatch: int
    trace: RequestTrace


class WorkerLoad(msgspec.Struct, frozen=True):
    """What a worker tells on its streams with each heartbeat while anything happens; the router's
    policy reads it.

    Attributes:
        num_waiting: requests without blocks.
        num_receiving: reservations whose KV is on its way.
        waiting_prompt_tokens: uncomputed prompt tokens of waiting and running requests.
        prefill_tokens_per_s, decode_step_s: smoothed measurements, None until measured.
        transfer_bytes_per_s: of outbound pushes, None until measured.
        preemptions: since boot; sequences that lost their blocks here and are computed again.
        is_draining: it takes nothing new, and would hand over what runs.
        path_failure: why it can move no KV, empty where it can, see `kv_transfer.paths`.
        is_unpaired: for that reason it should be paired with nobody now.
        fences: since boot; times the KV region was moved away from under late writes.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_receiving: int = 0
    waiting_prompt_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_owned: int = 0
    blocks_reserved: int = 0
    blocks_quarantined: int = 0
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    transfer_bytes_per_s: float | None = None
    preemptions: int = 0
    is_draining: bool = False
    path_failure: str = ""
    is_unpaired: bool = False
    fences: int = 0


class RequestRefused(msgspec.Struct, frozen=True):
    """Worker to router: nothing was started. Try elsewhere, or later.

    Attributes:
        reason: "overloaded", "wrong_role", "draining", "no_prefill_worker"; never retriable:
            "too_long", "invalid".
        load: of this moment, where the engine was asked and had no room; the router need not wait
            for a heartbeat to believe it.
    """

    request_id: RequestId
    dispatch: int
    reason: str
    message: str
    load: WorkerLoad | None = None


class RequestFailed(msgspec.Struct, frozen=True):
    """Worker to router: it ended without finishing.

    Attributes:
        retriable: whether another worker may go on from the tokens so far.
    """

    request_id: RequestId
    dispatch: int
    message: str
    retriable: bool


class RequestMoved(msgspec.Struct, frozen=True):
    """Worker to router: stopped as asked, and the last word of this dispatch. Another worker goes
    on from the tokens so far.

    Attributes:
        has_kv: whether the KV of the prompt, and of what came after it, is here for a while, for
            the next worker to ask for.
    """

    request_id: RequestId
    dispatch: int
    has_kv: bool


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """`count` blocks of neighbouring ids, from `first`."""

    first: BlockId
    count: int


class RegionDescriptor(msgspec.Struct, frozen=True):
    """Where one rank's pool can be written: valid for this boot and this generation only."""

    worker_id: WorkerId
    boot: Boot
    generation: int
    address: int
    num_bytes: int
    block_bytes: int
    layout: str  # KvLayout.summary()
    metadata: bytes  # the transport's own, opaque (NIXL agent metadata)


class PrefillAsk(msgspec.Struct, frozen=True):
    """Decode to prefill: compute this prompt, push what I lack, send the first token(s).

    Attributes:
        request: `request.outputs`, when not empty, are forced: compute KV of the prompt only and
            sample nothing. The prompt is what is to move, see `EngineRequest.for_peer`.
        first_block: index, in the prompt, of the first block that decode lacks.
        blocks: decode's reserved blocks for prompt blocks `first_block`, `first_block + 1`, ...
        remaining_s: the time that the request has left; a try has no limit of its own, it ends
            when nothing was heard of it for `kv_transfer.try_s`.
        verify: each write's notification is to carry a checksum of its bytes.
    """

    handoff: HandoffId
    request: EngineRequest
    first_block: int
    blocks: tuple[BlockRun, ...]
    region: RegionDescriptor
    remaining_s: float
    verify: bool = False


class SettleHandoff(msgspec.Struct, frozen=True):
    """Decode to prefill: stop this attempt; answer once no write of it can land any more.

    Idempotent, and it may overtake the ask: it leaves a tombstone that refuses a later ask.
    """

    handoff: HandoffId


class HandoffProgress(msgspec.Struct, frozen=True):
    """Prefill to decode, with each heartbeat: these attempts are queued or computed here, and the
    engine goes on. Waiting in a queue is not silence: asking elsewhere would only lengthen it.

    An attempt whose prompt is computed is not among them: its writes tell of themselves.
    """

    handoffs: tuple[HandoffId, ...]


class HandoffScored(msgspec.Struct, frozen=True):
    """Prefill to decode: log-probabilities of a chunk of the prompt, where they are asked for; in
    order and ahead of the first tokens."""

    handoff: HandoffId
    logprobs: PromptLogprobs


class FirstTokens(msgspec.Struct, frozen=True):
    """Prefill to decode: the prompt is computed.

    Attributes:
        token_ids: one a sample; empty when outputs were forced.
        logprobs: one a sample when asked for.
        finish_reasons: one a sample; not None where the first token ends the sample.
        cached_tokens: prompt tokens that the prefill worker found in its cache.
    """

    handoff: HandoffId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reasons: tuple[FinishReason | None, ...]
    cached_tokens: int
    queue_s: float
    prefill_s: float


class HandoffRefused(msgspec.Struct, frozen=True):
    """Prefill to decode: nothing was started and nothing was or will be written.

    Attributes:
        reason: "overloaded", "context_length_exceeded", "wrong_role", "draining", "layout",
            "settled", "invalid" (its name is in use, or its fields disagree).
    """

    handoff: HandoffId
    reason: str
    message: str


class HandoffFailed(msgspec.Struct, frozen=True):
    """Prefill to decode: this attempt will not complete. Its writes are settled only by
    HandoffSettled.

    Attributes:
        is_fabric: its writes are why.
    """

    handoff: HandoffId
    message: str
    is_fabric: bool = False


class HandoffSettled(msgspec.Struct, frozen=True):
    """Prefill to decode: every write of this attempt is DONE or was never posted."""

    handoff: HandoffId


RouterToWorker = StartRequest | AbortRequest | MoveRequest
WorkerOrder = DrainWorker | SwitchRole
WorkerToRouter = (
    TokenBatch
    | PromptScored
    | PathReport
    | RequestRefused
    | RequestFailed
    | RequestMoved
    | WorkerLoad
)
DecodeToPrefill = PrefillAsk | SettleHandoff
PrefillToDecode = (
    HandoffProgress | HandoffScored | FirstTokens | HandoffRefused | HandoffFailed | HandoffSettled
)


class WriteNotification(msgspec.Struct, frozen=True, array_like=True):
    """Travels with one fabric write and arrives after its bytes are visible.

    Attributes:
        source, target: boots of the writer and of the owner of the memory.
        rank_pair: (writer's rank, target's rank).
        first_block, num_blocks: range of prompt blocks that this write brought.
        transport: what the writer saw its writes go over so far ("ucx (cma)"), or empty; a target
            cannot see it.
        checksum: CRC-32 of its bytes, where the ask wanted one.
    """

    handoff: HandoffId
    source: Boot
    target: Boot
    rank_pair: tuple[int, int]
    generation: int
    first_block: int
    num_blocks: int
    transport: str = ""
    checksum: int | None = None
