"""What a prefill worker tells of itself; counters only grow."""

from __future__ import annotations

import msgspec

from kv_transfer.handoff.prefill_messages import AttemptOutcome


class PrefillStats(msgspec.Struct, frozen=True):
    """A snapshot.

    Attributes:
        attempts_by_stage: gauges; they sum to the attempts that this worker works on.
        attempts_by_outcome: counters.
        writes_pending: gauge.
        agent_renewals: how often the fabric agent was destroyed to let go of blocks.
    """

    attempts_by_stage: dict[str, int]
    attempts_by_outcome: dict[AttemptOutcome, int]
    writes_pending: int
    tombstones: int
    blocks_pushed: int
    bytes_pushed: int
    writes_failed: int
    agent_renewals: int
