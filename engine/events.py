"""What one engine step tells its owner (a pool). Plain values, in the order in which they happened.

A request enters the engine's one waiting queue in one of three modes, which differ in who computes
the prompt's KV and who goes on from it:

    LOCAL    waiting -> Admitted -> chunks -> Generated... -> finished
    PREFILL  waiting -> Admitted -> chunks: Computed... -> Generated (first tokens) -> held
    RECEIVE  waiting -> Reserved -> kv_arrived() -> Generated... -> finished
                    '-> Admitted -> as LOCAL, without a handoff: all reusable blocks were here

A sample is over with the `Generated` that has a finish reason, or with an abort, which emits
nothing. A finished sample's full blocks go to the radix cache. A held request's blocks are the
source of outbound writes until `release()`; then they go there too. `Preempted` may come between
two `Generated` of a sample, whose blocks are then computed again.
"""

from __future__ import annotations

import enum

import msgspec

from core.block_hash import BlockHash
from core.ids import BlockId, HandoffId, RequestId
from core.request import FinishReason, PromptLogprobs, TokenLogprobs


class Mode(enum.Enum):
    """Who computes the prompt's KV, seen from this engine."""

    LOCAL = "local"
    PREFILL = "prefill"
    RECEIVE = "receive"


class Admitted(msgspec.Struct, frozen=True):
    """Blocks were allocated and computing starts with this step.

    Attributes:
        mode: LOCAL for a RECEIVE request that needs no handoff.
        block_ids: of all tokens that are known: the prompt with its partial tail, and outputs that
            are forced for its only sample.
        cached_tokens: prompt tokens found in this engine's radix cache: whole blocks, or the whole
            prompt where forced outputs were found behind it.
    """

    request_id: RequestId
    mode: Mode
    block_ids: tuple[BlockId, ...]
    cached_tokens: int


class Reserved(msgspec.Struct, frozen=True):
    """Blocks of a RECEIVE request wait for a peer's writes.

    Attributes:
        handoff: the attempt that these blocks belong to; a retry gets another and fresh blocks.
        block_ids: of all tokens whose KV moves (`EngineRequest.carried`); the first
            `num_cached_blocks` were found in the cache (owned), the rest are reserved and invisible
            to everyone else until `kv_arrived`.
    """

    handoff: HandoffId
    block_ids: tuple[BlockId, ...]
    num_cached_blocks: int


class Computed(msgspec.Struct, frozen=True):
    """A PREFILL request's prompt KV is complete in its blocks up to here.

    Attributes:
        num_computed: prompt tokens; blocks below num_computed // block_size are final, and at the
            prompt's end the partial tail block too.
    """

    request_id: RequestId
    num_computed: int


class Scored(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens, where the request asks for them (LOCAL and PREFILL).

    Each is told once, in order, and all before the first `Generated`. Such a request reads no
    cached block whose tokens are not scored yet: the cache holds keys and values, not logits.
    """

    request_id: RequestId
    logprobs: PromptLogprobs


class Generated(msgspec.Struct, frozen=True):
    """New tokens of one sample."""

    request_id: RequestId
    sample_index: int
    start_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


class Preempted(msgspec.Struct, frozen=True):
    """A running sample lost its blocks and will be recomputed here."""

    request_id: RequestId
    sample_index: int


class CacheChanged(msgspec.Struct, frozen=True):
    """Block hashes that became matchable here, and those that were evicted; the ledger's food."""

    stored: tuple[BlockHash, ...]
    evicted: tuple[BlockHash, ...]


Event = Admitted | Reserved | Computed | Scored | Generated | Preempted | CacheChanged


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot of gauges and counters; counters only grow.

    Attributes:
        prompt_tokens_computed, prompt_tokens_cached, prompt_tokens_received: by where their KV
            came from, as the engine that runs the request's outputs sees it. A request counts once
            in all its life: where and when its prompt is first complete, or it ends with an answer
            that its first tokens were. So neither on a prefill worker nor at a retry, a recompute
            or a dispatch that brings outputs. Hence they sum, over all processes, to the prompt
            tokens of requests served.
        prefix_queries, prefix_hits: prompt tokens, counted together with those; hits are those that
            no engine computed: found here, or in the cache of the peer that sent the rest.
        peer_tokens_computed, peer_tokens_cached: tokens of PREFILL prompts, outputs that move
            among them; the decode worker that asked counts those of the prompt too, as received,
            if it got them.
        prefill_tokens_per_s, decode_step_s: smoothed; None until measured.
        iteration_tokens: steps by their query tokens, one count for each of
            `engine.scheduling.counters.ITERATION_TOKENS_BOUNDS` and one for more.
    """

    num_running: int
    num_waiting: int
    num_receiving: int
    num_held: int
    waiting_prompt_tokens: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    blocks_reserved: int
    blocks_quarantined: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    prompt_tokens_received: int
    generated_tokens: int
    steps: int
    block_copies: int
    prefill_tokens_per_s: float | None
    decode_step_s: float | None
    iteration_tokens: tuple[int, ...] = ()
    iteration_tokens_sum: int = 0
    peer_tokens_computed: int = 0
    peer_tokens_cached: int = 0
