"""Whether a cluster has nothing left to do, and whether its gauges agree."""

from __future__ import annotations

from collections.abc import Iterator

from planner.protocol.cluster import Cluster
from planner.protocol.worker import Worker
from prefill_pool.worker import PrefillWorker


def why_busy(cluster: Cluster) -> Iterator[str]:
    """Yield what is not over: requests, attempts, blocks that are neither free nor cached."""
    for client in cluster.clients:
        if client.ending is None:
            yield f"request {client.number} has not ended"
    num_requests = cluster.router.dispatcher.num_requests()
    if num_requests:
        yield f"{cluster.router.process} has {num_requests} requests"
    for worker in cluster.workers.values():
        yield from _why_worker_busy(worker)


def _why_worker_busy(worker: Worker) -> Iterator[str]:
    who = str(worker.process)
    if worker.num_open:
        yield f"{who} works on {worker.num_open} requests"
    counts = worker.engine.scheduler.state.memory.pool.counts()
    for what, count in (
        ("owned", counts.owned),
        ("reserved", counts.reserved),
        ("quarantined", counts.quarantined),
    ):
        if count:
            yield f"{who} has {count} blocks {what}"
    if worker.engine.scheduler.state.runs:
        yield f"{who}'s engine has {sorted(worker.engine.scheduler.state.runs)}"


def gauge_errors(cluster: Cluster) -> Iterator[str]:
    """Yield gauges that do not sum to what they count."""
    dispatcher = cluster.router.dispatcher
    by_state = dispatcher.requests_by_state()
    if sum(by_state.values()) != dispatcher.num_requests():
        yield f"{cluster.router.process}: {by_state} of {dispatcher.num_requests()} requests"
    for worker in cluster.workers.values():
        yield from _worker_gauge_errors(worker)


def _worker_gauge_errors(worker: Worker) -> Iterator[str]:
    stats = worker.engine.stats()
    blocks = (
        stats.blocks_free
        + stats.blocks_cached
        + stats.blocks_owned
        + stats.blocks_reserved
        + stats.blocks_quarantined
    )
    if blocks != stats.blocks_total:
        yield f"{worker.process}: {blocks} of {stats.blocks_total} blocks"
    by_state = _requests_by_state(worker)
    if sum(by_state.values()) != worker.num_open:
        yield f"{worker.process}: {by_state} of {worker.num_open} requests"


def _requests_by_state(worker: Worker) -> dict[str, int]:
    pool = worker.pool
    if isinstance(pool, PrefillWorker):
        prefill_stats = pool.stats()
        return {} if prefill_stats is None else prefill_stats.attempts_by_stage
    decode_stats = pool.stats()
    by_state = {} if decode_stats is None else decode_stats.requests_by_state
    return {state.value: count for state, count in by_state.items()}
