"""What is left of requests that are over, as processes tell it of themselves: blocks, requests in
any gauge, and more open files, threads, keys or leases than before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.scrape import BLOCK_STATES, IN_USE, Scrape

WORKER_GAUGES = (
    "dovetail:worker_requests",
    "dovetail:prefill_attempts",
    "dovetail:writes_pending",
    "dovetail:engine_sequences",
    "dovetail:quarantined_attempts",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_swapped",
)
ROUTER_GAUGES = ("dovetail:requests", "dovetail:http_requests")
"""What must be there, and 0, where nothing runs."""

_OF_A_WORKER = ("requests_of_this_router", "requests_on_their_way")
"""What a router's `/status` counts for each worker."""


def in_use(workers: Mapping[str, Scrape], routers: Mapping[str, Scrape]) -> list[str]:
    """Return what series say of requests under way; a series that is not there tells nothing, which
    is as bad."""
    found = [text for name, series in workers.items() for text in _blocks(name, series)]
    for gauges, processes in ((WORKER_GAUGES, workers), (ROUTER_GAUGES, routers)):
        for name, series in processes.items():
            found += [f"{name}: no {gauge}" for gauge in gauges if gauge not in series.names]
            totals = [(gauge, series.total(gauge)) for gauge in gauges]
            found += [f"{name}: {total:g} {gauge}" for gauge, total in totals if total]
    return found


def _blocks(name: str, series: Scrape) -> list[str]:
    blocks = series.blocks
    found = [f"{name}: {blocks[state]} {state}" for state in IN_USE if blocks[state]]
    if sum(blocks[state] for state in BLOCK_STATES) != blocks["total"]:
        found.append(f"{name}: {blocks} do not sum up")
    return found


def still_counted(router: str, statuses: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what a router believes of requests at workers; `statuses` by worker."""
    return [
        f"{router}: {status[count]} {count} at {worker}"
        for worker, status in statuses.items()
        for count in _OF_A_WORKER
        if status[count]
    ]


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return what there is more of than before."""
    more = [name for name, allowed in before.items() if now.get(name, 0) > allowed]
    return [f"{name}: {now[name]}, at most {before[name]} before" for name in more]
