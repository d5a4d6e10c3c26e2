"""What `/status` shows of the workers."""

from __future__ import annotations

from router.dispatch.worker_link import WorkerLink


def worker_status(link: WorkerLink) -> dict[str, object]:
    """Return one worker as JSON can say it."""
    record, load = link.record, link.load
    return {
        "id": record.worker_id,
        "role": record.role.value,
        "state": link.state.value,
        "boot": record.boot,
        "pid": record.pid,
        "address": record.address,
        "metrics_address": record.metrics_address,
        "model": record.model,
        "transport": record.transport,
        "registered": link.is_registered,
        "blocks": {
            "free": load.blocks_free,
            "cached": load.blocks_cached,
            "owned": load.blocks_owned,
            "reserved": load.blocks_reserved,
            "quarantined": load.blocks_quarantined,
            "total": load.blocks_total or record.num_blocks,
        },
        "queues": {
            "running": load.num_running,
            "waiting": load.num_waiting,
            "receiving": load.num_receiving,
            "waiting_prompt_tokens": load.waiting_prompt_tokens,
            "preemptions": load.preemptions,
        },
        "fences": load.fences,
        "path_failure": load.path_failure,
        "paired": not load.is_unpaired,
        "requests_of_this_router": len(link.requests),
        "requests_on_their_way": len(link.pending),
    }
