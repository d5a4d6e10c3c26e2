from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason

class Frame(_message.Message):
    __slots__ = ("hello", "messages", "closing")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    closing: str
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., closing: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("kind", "name", "boot", "expected_boot", "cluster", "model_fingerprint", "layout", "protocol")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BOOT_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    boot: str
    expected_boot: str
    cluster: str
    model_fingerprint: str
    layout: str
    protocol: int
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., boot: _Optional[str] = ..., expected_boot: _Optional[str] = ..., cluster: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., layout: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("start_request", "abort_request", "token_batch", "path_report", "request_refused", "request_failed", "worker_load", "prefill_ask", "settle_handoff", "first_tokens", "handoff_refused", "handoff_failed", "handoff_settled", "handoff_progress", "prompt_scored", "handoff_scored", "move_request", "request_moved", "drain_worker", "switch_role")
    START_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ABORT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BATCH_FIELD_NUMBER: _ClassVar[int]
    PATH_REPORT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_REFUSED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FAILED_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ASK_FIELD_NUMBER: _ClassVar[int]
    SETTLE_HANDOFF_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_REFUSED_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FAILED_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_SETTLED_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORED_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_SCORED_FIELD_NUMBER: _ClassVar[int]
    MOVE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_MOVED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_WORKER_FIELD_NUMBER: _ClassVar[int]
    SWITCH_ROLE_FIELD_NUMBER: _ClassVar[int]
    start_request: StartRequest
    abort_request: AbortRequest
    token_batch: TokenBatch
    path_report: PathReport
    request_refused: RequestRefused
    request_failed: RequestFailed
    worker_load: WorkerLoad
    prefill_ask: PrefillAsk
    settle_handoff: SettleHandoff
    first_tokens: FirstTokens
    handoff_refused: HandoffRefused
    handoff_failed: HandoffFailed
    handoff_settled: HandoffSettled
    handoff_progress: HandoffProgress
    prompt_scored: PromptScored
    handoff_scored: HandoffScored
    move_request: MoveRequest
    request_moved: RequestMoved
    drain_worker: DrainWorker
    switch_role: SwitchRole
    def __init__(self, start_request: _Optional[_Union[StartRequest, _Mapping]] = ..., abort_request: _Optional[_Union[AbortRequest, _Mapping]] = ..., token_batch: _Optional[_Union[TokenBatch, _Mapping]] = ..., path_report: _Optional[_Union[PathReport, _Mapping]] = ..., request_refused: _Optional[_Union[RequestRefused, _Mapping]] = ..., request_failed: _Optional[_Union[RequestFailed, _Mapping]] = ..., worker_load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., prefill_ask: _Optional[_Union[PrefillAsk, _Mapping]] = ..., settle_handoff: _Optional[_Union[SettleHandoff, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., handoff_refused: _Optional[_Union[HandoffRefused, _Mapping]] = ..., handoff_failed: _Optional[_Union[HandoffFailed, _Mapping]] = ..., handoff_settled: _Optional[_Union[HandoffSettled, _Mapping]] = ..., handoff_progress: _Optional[_Union[HandoffProgress, _Mapping]] = ..., prompt_scored: _Optional[_Union[PromptScored, _Mapping]] = ..., handoff_scored: _Optional[_Union[HandoffScored, _Mapping]] = ..., move_request: _Optional[_Union[MoveRequest, _Mapping]] = ..., request_moved: _Optional[_Union[RequestMoved, _Mapping]] = ..., drain_worker: _Optional[_Union[DrainWorker, _Mapping]] = ..., switch_role: _Optional[_Union[SwitchRole, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top_ids", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top: _Optional[_Iterable[float]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "eos_token_ids", "ignore_eos", "logprobs", "seed", "bad_words", "prompt_logprobs")
    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    seed: int
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    prompt_logprobs: int
    def __init__(self, n: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., seed: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class EngineRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "outputs", "namespace", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    outputs: _containers.RepeatedCompositeFieldContainer[TokenIds]
    namespace: bytes
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., namespace: _Optional[bytes] = ..., priority: _Optional[int] = ...) -> None: ...

class PrefillCandidate(_message.Message):
    __slots__ = ("worker_id", "boot", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    boot: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., boot: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("request", "dispatch", "candidates", "remaining_s", "allow_local")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    ALLOW_LOCAL_FIELD_NUMBER: _ClassVar[int]
    request: EngineRequest
    dispatch: int
    candidates: _containers.RepeatedCompositeFieldContainer[PrefillCandidate]
    remaining_s: float
    allow_local: bool
    def __init__(self, request: _Optional[_Union[EngineRequest, _Mapping]] = ..., dispatch: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[PrefillCandidate, _Mapping]]] = ..., remaining_s: _Optional[float] = ..., allow_local: _Optional[bool] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "dispatch", "sample_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    dispatch: int
    sample_index: int
    def __init__(self, request_id: _Optional[str] = ..., dispatch: _Optional[int] = ..., sample_index: _Optional[int] = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("request_id", "dispatch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    dispatch: int
    def __init__(self, request_id: _Optional[str] = ..., dispatch: _Optional[int] = ...) -> None: ...

class DrainWorker(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class SwitchRole(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("request_ids", "sample_indices", "dispatches", "start_indices", "num_tokens", "token_ids", "num_logprobs", "logprobs", "finish_reasons")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    DISPATCHES_FIELD_NUMBER: _ClassVar[int]
    START_INDICES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    dispatches: _containers.RepeatedScalarFieldContainer[int]
    start_indices: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reasons: _containers.RepeatedScalarFieldContainer[FinishReason]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., dispatches: _Optional[_Iterable[int]] = ..., start_indices: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reasons: _Optional[_Iterable[_Union[FinishReason, str]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("start", "chosen", "ranks", "num_top", "top_ids", "top")
    START_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    chosen: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    num_top: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, start: _Optional[int] = ..., chosen: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., num_top: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptScored(_message.Message):
    __slots__ = ("request_id", "dispatch", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    dispatch: int
    logprobs: PromptLogprobs
    def __init__(self, request_id: _Optional[str] = ..., dispatch: _Optional[int] = ..., logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class RequestTrace(_message.Message):
    __slots__ = ("decode_worker", "decision", "prefill_worker", "attempt", "cached_tokens", "blocks_transferred", "blocks_reused_prefill", "blocks_reused_decode", "bytes_transferred", "reservation_wait_s", "prefill_queue_s", "prefill_s", "prefill_round_trip_s", "exposed_transfer_s", "join_wait_s")
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REUSED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REUSED_DECODE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    JOIN_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    decode_worker: str
    decision: str
    prefill_worker: str
    attempt: int
    cached_tokens: int
    blocks_transferred: int
    blocks_reused_prefill: int
    blocks_reused_decode: int
    bytes_transferred: int
    reservation_wait_s: float
    prefill_queue_s: float
    prefill_s: float
    prefill_round_trip_s: float
    exposed_transfer_s: float
    join_wait_s: float
    def __init__(self, decode_worker: _Optional[str] = ..., decision: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., attempt: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., blocks_transferred: _Optional[int] = ..., blocks_reused_prefill: _Optional[int] = ..., blocks_reused_decode: _Optional[int] = ..., bytes_transferred: _Optional[int] = ..., reservation_wait_s: _Optional[float] = ..., prefill_queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., prefill_round_trip_s: _Optional[float] = ..., exposed_transfer_s: _Optional[float] = ..., join_wait_s: _Optional[float] = ...) -> None: ...

class PathReport(_message.Message):
    __slots__ = ("request_id", "dispatch", "trace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    dispatch: int
    trace: RequestTrace
    def __init__(self, request_id: _Optional[str] = ..., dispatch: _Optional[int] = ..., trace: _Optional[_Union[RequestTrace, _Mapping]] = ...) -> None: ...

class RequestRefused(_message.Message):
    __slots__ = ("request_id", "dispatch", "reason", "message", "load")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    dispatch: int
    reason: str
    message: str
    load: WorkerLoad
    def __init__(self, request_id: _Optional[str] = ..., dispatch: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("request_id", "dispatch", "message", "retriable")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRIABLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    dispatch: int
    message: str
    retriable: bool
    def __init__(self, request_id: _Optional[str] = ..., dispatch: _Optional[int] = ..., message: _Optional[str] = ..., retriable: _Optional[bool] = ...) -> None: ...

class RequestMoved(_message.Message):
    __slots__ = ("request_id", "dispatch", "has_kv")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    HAS_KV_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    dispatch: int
    has_kv: bool
    def __init__(self, request_id: _Optional[str] = ..., dispatch: _Optional[int] = ..., has_kv: _Optional[bool] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_receiving", "waiting_prompt_tokens", "blocks_total", "blocks_free", "blocks_cached", "blocks_owned", "blocks_reserved", "blocks_quarantined", "prefill_tokens_per_s", "decode_step_s", "transfer_bytes_per_s", "preemptions", "is_draining", "path_failure", "is_unpaired", "fences")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_OWNED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    PATH_FAILURE_FIELD_NUMBER: _ClassVar[int]
    IS_UNPAIRED_FIELD_NUMBER: _ClassVar[int]
    FENCES_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_receiving: int
    waiting_prompt_tokens: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    blocks_reserved: int
    blocks_quarantined: int
    prefill_tokens_per_s: float
    decode_step_s: float
    transfer_bytes_per_s: float
    preemptions: int
    is_draining: bool
    path_failure: str
    is_unpaired: bool
    fences: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_receiving: _Optional[int] = ..., waiting_prompt_tokens: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_owned: _Optional[int] = ..., blocks_reserved: _Optional[int] = ..., blocks_quarantined: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., transfer_bytes_per_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., is_draining: _Optional[bool] = ..., path_failure: _Optional[str] = ..., is_unpaired: _Optional[bool] = ..., fences: _Optional[int] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("dispatch", "trial")
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    dispatch: int
    trial: int
    def __init__(self, dispatch: _Optional[int] = ..., trial: _Optional[int] = ...) -> None: ...

class HandoffId(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: Attempt
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[_Union[Attempt, _Mapping]] = ...) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class RegionDescriptor(_message.Message):
    __slots__ = ("worker_id", "boot", "generation", "address", "num_bytes", "block_bytes", "layout", "metadata")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    boot: str
    generation: int
    address: int
    num_bytes: int
    block_bytes: int
    layout: str
    metadata: bytes
    def __init__(self, worker_id: _Optional[str] = ..., boot: _Optional[str] = ..., generation: _Optional[int] = ..., address: _Optional[int] = ..., num_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., layout: _Optional[str] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class PrefillAsk(_message.Message):
    __slots__ = ("handoff", "request", "first_block", "blocks", "region", "remaining_s", "verify")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffId
    request: EngineRequest
    first_block: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockRun]
    region: RegionDescriptor
    remaining_s: float
    verify: bool
    def __init__(self, handoff: _Optional[_Union[HandoffId, _Mapping]] = ..., request: _Optional[_Union[EngineRequest, _Mapping]] = ..., first_block: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., region: _Optional[_Union[RegionDescriptor, _Mapping]] = ..., remaining_s: _Optional[float] = ..., verify: _Optional[bool] = ...) -> None: ...

class SettleHandoff(_message.Message):
    __slots__ = ("handoff",)
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffId
    def __init__(self, handoff: _Optional[_Union[HandoffId, _Mapping]] = ...) -> None: ...

class HandoffProgress(_message.Message):
    __slots__ = ("handoffs",)
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    handoffs: _containers.RepeatedCompositeFieldContainer[HandoffId]
    def __init__(self, handoffs: _Optional[_Iterable[_Union[HandoffId, _Mapping]]] = ...) -> None: ...

class HandoffScored(_message.Message):
    __slots__ = ("handoff", "logprobs")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffId
    logprobs: PromptLogprobs
    def __init__(self, handoff: _Optional[_Union[HandoffId, _Mapping]] = ..., logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("handoff", "token_ids", "logprobs", "finish_reasons", "cached_tokens", "queue_s", "prefill_s")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffId
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reasons: _containers.RepeatedScalarFieldContainer[FinishReason]
    cached_tokens: int
    queue_s: float
    prefill_s: float
    def __init__(self, handoff: _Optional[_Union[HandoffId, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reasons: _Optional[_Iterable[_Union[FinishReason, str]]] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class HandoffRefused(_message.Message):
    __slots__ = ("handoff", "reason", "message")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffId
    reason: str
    message: str
    def __init__(self, handoff: _Optional[_Union[HandoffId, _Mapping]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class HandoffFailed(_message.Message):
    __slots__ = ("handoff", "message", "is_fabric")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IS_FABRIC_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffId
    message: str
    is_fabric: bool
    def __init__(self, handoff: _Optional[_Union[HandoffId, _Mapping]] = ..., message: _Optional[str] = ..., is_fabric: _Optional[bool] = ...) -> None: ...

class HandoffSettled(_message.Message):
    __slots__ = ("handoff",)
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffId
    def __init__(self, handoff: _Optional[_Union[HandoffId, _Mapping]] = ...) -> None: ...
