"""Events and effects of `decode_side`. A peer's own messages are events as they come."""

from __future__ import annotations

import enum

import msgspec

from core.ids import BlockId, Boot, HandoffId
from core.messages import (
    BlockRun,
    FirstTokens,
    HandoffFailed,
    HandoffRefused,
    PrefillCandidate,
    WriteNotification,
)
from core.request import EngineRequest


class AttemptOutcome(enum.StrEnum):
    """How one attempt ended; each attempt that was asked is counted once."""

    COMPLETED = "completed"
    REFUSED = "refused"
    UNDELIVERED = "undelivered"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    PEER_LOST = "peer_lost"
    REVOKED = "revoked"
    ABORTED = "aborted"


# --- events -------------------------------------------------------------------------------------


class BlocksReserved(msgspec.Struct, frozen=True):
    """The engine reserved this attempt's blocks.

    Attributes:
        block_ids: of all tokens whose KV moves (`EngineRequest.carried`); the first
            `num_cached_blocks` hold theirs already.
        generation: of the region that the blocks lie in.
    """

    handoff: HandoffId
    block_ids: tuple[BlockId, ...]
    num_cached_blocks: int
    generation: int


class FoundLocally(msgspec.Struct, frozen=True):
    """The engine held all reusable blocks already and computes the rest itself."""


class AttemptAlive(msgspec.Struct, frozen=True):
    """The prefill worker has this attempt queued or computes it: a `HandoffProgress` names it."""

    handoff: HandoffId


class AskUndelivered(msgspec.Struct, frozen=True):
    """The ask never left this process, so nothing was or will be written."""

    handoff: HandoffId
    reason: str


class PeerLost(msgspec.Struct, frozen=True):
    """The stream to a prefill worker closed, or its heartbeats stopped."""

    boot: Boot
    reason: str


class RegionRevoked(msgspec.Struct, frozen=True):
    """A fence begins: writes to this generation of the region, or an older one, may be lost."""

    generation: int


class SampleAborted(msgspec.Struct, frozen=True):
    """The router wants no more of one sample (a stop string ended it)."""

    sample_index: int


class Aborted(msgspec.Struct, frozen=True):
    """The router wants no more of the request."""


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


PeerEvent = (
    AttemptAlive | FirstTokens | HandoffRefused | HandoffFailed | AskUndelivered | WriteNotification
)
OwnEvent = BlocksReserved | FoundLocally | PeerLost | RegionRevoked | SampleAborted | Aborted | Tick
Event = PeerEvent | OwnEvent


# --- effects ------------------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True):
    """Ask `candidate` for prompt blocks `first_block`...; the pool adds the region's descriptor.

    Attributes:
        request: as for a peer: what is to move is its prompt (`EngineRequest.for_peer`).
    """

    candidate: PrefillCandidate
    handoff: HandoffId
    request: EngineRequest
    first_block: int
    blocks: tuple[BlockRun, ...]
    remaining_s: float


class Settle(msgspec.Struct, frozen=True):
    """Quarantine this attempt, whose blocks the effect before abandoned; ask its peer to settle."""

    candidate: PrefillCandidate
    handoff: HandoffId
    generation: int


class EmitTokens(msgspec.Struct, frozen=True):
    """Send the first tokens on, those of `samples` only (the router aborted the others)."""

    tokens: FirstTokens
    samples: tuple[int, ...]


class Join(msgspec.Struct, frozen=True):
    """The KV is complete: hand the blocks to the engine.

    Attributes:
        first_tokens: one a sample, empty when the request's outputs were forced.
        num_received: prompt tokens that came over the fabric.
    """

    handoff: HandoffId
    first_tokens: tuple[int, ...]
    num_received: int


class Retry(msgspec.Struct, frozen=True):
    """Abandon `handoff`'s blocks and queue at the front for fresh ones.

    Attributes:
        untouched: nothing can land in the old blocks; they need no quarantine.
    """

    handoff: HandoffId
    successor: HandoffId
    request: EngineRequest
    untouched: bool


class ComputeLocally(msgspec.Struct, frozen=True):
    """Abandon `handoff`'s blocks; this worker computes the prompt itself."""

    handoff: HandoffId
    request: EngineRequest
    untouched: bool


class EndReservation(msgspec.Struct, frozen=True):
    """The request is over before it joined.

    Attributes:
        answered: whether its first tokens were emitted: then its prompt was served.
    """

    handoff: HandoffId
    untouched: bool
    answered: bool = False


class Fail(msgspec.Struct, frozen=True):
    """Tell the router that the request cannot be served here."""

    message: str
    retriable: bool


class AttemptEnded(msgspec.Struct, frozen=True):
    """For the counters and the log."""

    handoff: HandoffId
    outcome: AttemptOutcome
    reason: str


Effect = (
    Ask | Settle | EmitTokens | Join | Retry | ComputeLocally | EndReservation | Fail | AttemptEnded
)
