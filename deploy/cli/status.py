"""`dovetail status`: the router's /status as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from deploy.api_client import START_ADVICE, ApiAddress, ApiClient
from deploy.terminal import say

_BLOCK_STATES = ("free", "cached", "owned", "reserved", "quarantined", "total")
_QUEUES = ("running", "waiting", "receiving")


class WorkerStatus(msgspec.Struct):
    """One worker as the router sees it.

    Attributes:
        boot: one life of its process.
        state: as the router's stream to it says.
        blocks: number of KV blocks by state.
        queues: requests by queue.
        fences: of its KV region, since it started.
        path_failure: why it can move no KV; empty where it can.
    """

    id: str
    role: str
    boot: str = ""
    state: str = ""
    pid: int = 0
    address: str = ""
    transport: str = ""
    blocks: dict[str, int] = {}
    queues: dict[str, int] = {}
    fences: int = 0
    path_failure: str = ""


class Attempts(msgspec.Struct, frozen=True):
    """Of the requests that ended at this router: how many, how many were tried again, and the
    attempts of all."""

    requests: int = 0
    retried: int = 0
    attempts: int = 0


class ClusterStatus(msgspec.Struct):
    """What /status says, as far as the table shows it.

    Attributes:
        requests: in flight, by state.
        indexed_blocks: entries of the router's prefix index.
    """

    model: str = ""
    ready: bool = False
    indexed_blocks: int = 0
    workers: list[WorkerStatus] = []
    requests: dict[str, int] = {}
    attempts: Attempts = Attempts()


def run_status(api: ApiAddress, *, as_json: bool) -> int:
    """Print the cluster's state and return the exit code.

    Raises:
        DovetailError: no cluster answers, or it refused.
    """
    client = ApiClient(api, advice=START_ADVICE, timeout_s=10.0)
    if as_json:
        document = client.get("/status", dict[str, Any])
        say(msgspec.json.format(msgspec.json.encode(document)).decode())
        return 0
    for line in render(client.get("/status", ClusterStatus)):
        say(line)
    return 0


def render(status: ClusterStatus) -> list[str]:
    """Return a line on the requests, and a table of the workers."""
    states = ", ".join(f"{count} {state}" for state, count in status.requests.items() if count)
    lines = [
        f"model     {status.model or '-'} ({'ready' if status.ready else 'not ready'})",
        f"requests  {states or 'none'}",
        f"attempts  {_attempts(status.attempts)}",
        f"index     {status.indexed_blocks} blocks known to be cached somewhere",
        "",
    ]
    if not status.workers:
        return [*lines, "no workers"]
    header = ["WORKER", "ROLE", "STATE", "PID", "ADDRESS", "TRANSPORT", *_QUEUES, *_BLOCK_STATES]
    header.append("FENCES")
    rows = [[word.upper() for word in header], *(_row(worker) for worker in status.workers)]
    troubles = [f"{one.id}: {one.path_failure}" for one in status.workers if one.path_failure]
    return [*lines, *align(rows), *troubles]


def _attempts(seen: Attempts) -> str:
    if not seen.requests:
        return "no request has ended"
    mean = seen.attempts / seen.requests
    return f"{mean:.2f} a request ({seen.retried} of {seen.requests} were tried again)"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with columns of equal width; numbers are set to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(cell.isdecimal() or cell == "-" for cell in column[1:]) for column in columns]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]


def _row(worker: WorkerStatus) -> list[str]:
    texts = (
        worker.id,
        worker.role,
        worker.state,
        str(worker.pid),
        worker.address,
        worker.transport,
    )
    return [
        *(text or "-" for text in texts),
        *(str(worker.queues.get(queue, "-")) for queue in _QUEUES),
        *(str(worker.blocks.get(state, "-")) for state in _BLOCK_STATES),
        str(worker.fences),
    ]
