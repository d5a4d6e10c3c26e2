"""Whether a cluster has nothing left to do, and whether its gauges agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from planner.protocol.cluster import Cluster
from planner.protocol.worker import Worker


def why_busy(cluster: Cluster) -> Iterator[str]:
    """Yield what is not over: requests, attempts, blocks that are neither free nor cached."""
    for client in cluster.clients:
        if client.ending is None:
            yield f"request {client.number} has not ended"
    for router in cluster.routers.values():
        num_requests = router.dispatcher.num_requests()
        if num_requests:
            yield f"{router.process} has {num_requests} requests"
    for worker in cluster.workers.values():
        yield from _why_worker_busy(worker)


def _why_worker_busy(worker: Worker) -> Iterator[str]:
    who = str(worker.process)
    if worker.end.is_stopped:
        yield f"{who} has not left"
    if worker.wanted_role is not worker.record.role:
        yield f"{who} is to have the role {worker.wanted_role}"
    if worker.pools.num_running:
        yield f"{who} works on {worker.pools.num_running} requests"
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
    for router in cluster.routers.values():
        dispatcher = router.dispatcher
        by_state = dispatcher.requests_by_state()
        if sum(by_state.values()) != dispatcher.num_requests():
            yield f"{router.process}: {by_state} of {dispatcher.num_requests()} requests"
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
    decode, prefill = worker.decode.stats(), worker.prefill.stats()
    requests = Counter(decode.requests_by_state if decode else {})
    attempts = Counter(prefill.attempts_by_stage if prefill else {})
    if requests.total() != worker.decode.num_requests:
        yield f"{worker.process}: {requests} of {worker.decode.num_requests} requests"
    if attempts.total() != worker.prefill.num_attempts:
        yield f"{worker.process}: {attempts} of {worker.prefill.num_attempts} attempts"
