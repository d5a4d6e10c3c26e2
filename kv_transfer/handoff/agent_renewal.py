"""When a prefill worker must destroy its fabric agent to let go of its own blocks.

A write to a frozen or vanished peer stays PENDING or FAILED for ever and may go on reading its
source, so those blocks are held until the agent is destroyed. That cuts every other write too, so
it waits for a moment without one, but not for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from kv_transfer.handoff.prefill_side import PrefillSide


def is_renewal_due(sides: Iterable[PrefillSide], now: float, patience_s: float) -> bool:
    """Return whether the agent should be destroyed and made anew.

    Args:
        sides: all attempts of this worker.
        patience_s: how long writes may take to end by themselves; doubled while healthy writes
            would be cut.
    """
    stuck_since: list[float] = []
    is_busy = False
    for side in sides:
        if side.stuck_since is None:
            is_busy = is_busy or bool(side.pending)
        elif side.pending or side.failed:
            stuck_since.append(side.stuck_since)
    if not stuck_since:
        return False
    return now >= min(stuck_since) + patience_s * (2 if is_busy else 1)
