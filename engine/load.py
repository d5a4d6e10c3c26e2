"""What a worker tells routers of its engine. Pure."""

from __future__ import annotations

from core.messages import WorkerLoad
from engine.events import EngineStats


def load_of(stats: EngineStats, *, transfer_bytes_per_s: float | None = None) -> WorkerLoad:
    """Return the engine's gauges as a message.

    Args:
        transfer_bytes_per_s: smoothed, of outbound pushes; None until measured.
    """
    return WorkerLoad(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_receiving=stats.num_receiving,
        waiting_prompt_tokens=stats.waiting_prompt_tokens,
        blocks_total=stats.blocks_total,
        blocks_free=stats.blocks_free,
        blocks_cached=stats.blocks_cached,
        blocks_owned=stats.blocks_owned,
        blocks_reserved=stats.blocks_reserved,
        blocks_quarantined=stats.blocks_quarantined,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        transfer_bytes_per_s=transfer_bytes_per_s,
        preemptions=stats.preemptions,
    )
