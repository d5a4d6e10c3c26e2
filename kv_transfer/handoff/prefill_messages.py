"""Events and effects of `prefill_side`."""

from __future__ import annotations

import enum

import msgspec

from core.ids import BlockId, HandoffId
from core.messages import FirstTokens, HandoffFailed, HandoffRefused, HandoffSettled
from core.request import EngineRequest, FinishReason, TokenLogprobs


class AttemptOutcome(enum.StrEnum):
    """How an attempt ended, for the counters."""

    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"
    SETTLED = "settled"
    TIMED_OUT = "timed_out"


# --- events -------------------------------------------------------------------------------------


class EngineRefused(msgspec.Struct, frozen=True):
    """The engine would not queue the request."""

    reason: str
    message: str


class PromptAdmitted(msgspec.Struct, frozen=True):
    """The engine allocated the prompt's blocks; those of `cached_tokens` hold their KV already."""

    block_ids: tuple[BlockId, ...]
    cached_tokens: int


class ChunkComputed(msgspec.Struct, frozen=True):
    """The prompt's KV is in its blocks up to `num_computed` tokens."""

    num_computed: int


class TokenSampled(msgspec.Struct, frozen=True):
    """The first token of one sample."""

    sample_index: int
    token_id: int
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None


class WriteDone(msgspec.Struct, frozen=True):
    """A posted write is DONE: its bytes are at the target, and nothing of it lands later."""

    number: int


class WriteFailed(msgspec.Struct, frozen=True):
    """A posted write FAILED. It may still read our blocks and still land at the target."""

    number: int
    reason: str


class WriteRefused(msgspec.Struct, frozen=True):
    """A write was not posted: it reads and writes nothing, now or later."""

    number: int
    reason: str


class SettleRequested(msgspec.Struct, frozen=True):
    """The decode worker wants the attempt to end, and to know when nothing can land any more."""


class DecodeLost(msgspec.Struct, frozen=True):
    """The stream that the ask came on closed: settle, with nobody to answer to."""


class AgentDestroyed(msgspec.Struct, frozen=True):
    """The agent that posted this attempt's writes below number `before` is gone: they read our
    blocks no more. What it had buffered in the kernel may still land, so this settles nothing."""

    before: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


Event = (
    EngineRefused
    | PromptAdmitted
    | ChunkComputed
    | TokenSampled
    | WriteDone
    | WriteFailed
    | WriteRefused
    | SettleRequested
    | DecodeLost
    | AgentDestroyed
    | Tick
)


# --- effects ------------------------------------------------------------------------------------


class Compute(msgspec.Struct, frozen=True):
    """Queue the request in the engine, its blocks held until `Release`."""

    request: EngineRequest


class Push(msgspec.Struct, frozen=True):
    """Post one write of whole blocks.

    Attributes:
        number: names the write in `WriteDone`, `WriteFailed` and `WriteRefused`.
        first_block: index in the prompt of the first block.
        sources, targets: ids here and there, one a block.
    """

    number: int
    first_block: int
    sources: tuple[BlockId, ...]
    targets: tuple[BlockId, ...]


class Tell(msgspec.Struct, frozen=True):
    """Send a message to the decode worker; dropped when its stream is gone."""

    message: FirstTokens | HandoffRefused | HandoffFailed | HandoffSettled


class StopComputing(msgspec.Struct, frozen=True):
    """Abort the unfinished prompt in the engine; its blocks stay held until `Release`."""


class Release(msgspec.Struct, frozen=True):
    """Let go of the source blocks: nothing reads them any more."""


class Forget(msgspec.Struct, frozen=True):
    """The attempt is over.

    Attributes:
        handoff: which one.
        may_land: a write of it failed, so no later settle may ever be answered.
    """

    handoff: HandoffId
    may_land: bool
    outcome: AttemptOutcome


Effect = Compute | Push | Tell | StopComputing | Release | Forget
