"""What fault tests do to a cluster's processes, and what they wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import psutil

from core.clock import SystemClock
from tests.cluster import Cluster
from tests.scrape import BLOCK_STATES, IN_USE, Scrape

T = TypeVar("T")

RECOVERY_S = 60.0
"""Generous: a worker's start on a busy machine."""

_POLL_S = 0.02


def until(
    look: Callable[[], T | None], what: str, timeout_s: float = RECOVERY_S, poll_s: float = _POLL_S
) -> T:
    """Return the first truthy answer of `look`, which asks a process that pushes no events.

    A process that is dead or not up yet (`httpx.TransportError`) is asked again.
    """
    clock = SystemClock()
    end = clock.now() + timeout_s
    while True:
        try:
            seen = look()
        except httpx.TransportError:
            seen = None
        if seen:
            return seen
        assert clock.now() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(poll_s)


class Router(Protocol):
    """A router that can be asked: `tests.cluster.Cluster` is one."""

    url: str
    http: httpx.Client


def statuses(router: Router) -> dict[str, dict[str, Any]]:
    """Return `/status`'s words about each worker, by its id."""
    answer = router.http.get(f"{router.url}/status").json()
    return {worker["id"]: worker for worker in answer["workers"]}


def scrape(router: Router, worker: str) -> Scrape:
    """Return a worker's series; `httpx.TransportError` where it is dead."""
    status = statuses(router).get(worker)
    if status is None:
        msg = f"{worker} is not known"
        raise httpx.ConnectError(msg)
    return Scrape.of(router.http, f"http://{status['metrics_address']}")


def wait_live(router: Router, *workers: str) -> None:
    """Return once the router has an open stream to each registered worker."""

    def look() -> bool:
        known = statuses(router)
        return all(
            name in known and known[name]["state"] == "live" and known[name]["registered"]
            for name in workers
        )

    until(look, f"{workers} live")


def wait_idle(router: Router, *workers: str, timeout_s: float = RECOVERY_S) -> dict[str, Scrape]:
    """Return once none of these workers holds a block for a request; asserts that none is lost."""
    clock = SystemClock()
    end = clock.now() + timeout_s
    while True:
        scrapes = {name: scrape(router, name) for name in workers}
        blocks = {name: one.blocks for name, one in scrapes.items()}
        if not any(one[state] for one in blocks.values() for state in IN_USE):
            break
        assert clock.now() < end, f"blocks in use after {timeout_s:g} s: {blocks}"
        time.sleep(_POLL_S)
    for one in blocks.values():
        assert sum(one[state] for state in BLOCK_STATES) == one["total"] > 0, blocks
    return scrapes


def process(cluster: Cluster, component: str) -> psutil.Process:
    """Return a component's present process."""
    return psutil.Process(cluster.pid(component))


def pool_address(process: psutil.Process) -> int:
    """Return where a worker has its KV memory: its only mapping with the advice for huge pages."""
    (address,) = (start for start, _, flags in mappings(process) if "hg" in flags)
    return address


def is_mapped(process: psutil.Process, address: int) -> bool:
    """Return whether a process may access an address."""
    return any(start <= address < end for start, end, _ in mappings(process))


def mappings(process: psutil.Process) -> Iterator[tuple[int, int, list[str]]]:
    """Yield start, end and flags (proc_pid_smaps(5)) of a process's mappings."""
    start = end = 0
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if name == "VmFlags:":
            yield start, end, values
        elif not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))


def kill(cluster: Cluster, component: str) -> int:
    """kill -9; returns the pid."""
    victim = process(cluster, component)
    victim.kill()
    return victim.pid


def wait_restarted(cluster: Cluster, component: str, dead: int) -> None:
    """Return once the launcher has started `component` again after the life `dead`, and, if it is a
    worker, the router has a stream to that life."""
    cluster.launched.wait_until(lambda: cluster.pid(component) != dead, RECOVERY_S)
    pid = cluster.pid(component)
    assert pid != dead, cluster.launched.transcript()
    if component in ("etcd", "router"):
        return

    def look() -> bool:
        status = statuses(cluster).get(component)
        return status is not None and status["pid"] == pid and status["state"] == "live"

    until(look, f"a stream to {component}, pid {pid}")


def deaths(cluster: Cluster) -> list[str]:
    """Return the components that the launcher saw die, in order."""
    lines = [line.split() for line in cluster.launched.out]
    return [line[0] for line in lines if line[1:2] == ["died"]]
