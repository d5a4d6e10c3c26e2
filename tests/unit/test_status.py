"""deploy.cli.status: an aligned table of what /status says."""

from __future__ import annotations

from deploy.cli.status import Attempts, ClusterStatus, WorkerStatus, align, render


def test_columns_align_and_numbers_stand_right() -> None:
    rows = [["NAME", "COUNT"], ["a", "7"], ["longer", "12345678"]]
    assert align(rows) == ["NAME       COUNT", "a              7", "longer  12345678"]


def test_table_shows_workers_blocks_and_queues() -> None:
    worker = WorkerStatus(
        id="decode-0",
        role="decode",
        state="open",
        pid=12,
        address="127.0.0.1:9",
        transport="nixl/ucx (cma)",
        blocks={"free": 90, "cached": 10, "total": 100},
        queues={"running": 2, "waiting": 0, "receiving": 1},
        fences=3,
        path_failure="no KV moves: reset",
    )
    status = ClusterStatus(
        model="m",
        ready=True,
        workers=[worker],
        requests={"streaming": 2, "waiting": 0},
        attempts=Attempts(requests=4, retried=1, attempts=6),
    )
    lines = render(status)
    assert "m (ready)" in lines[0]
    assert lines[1].split() == ["requests", "2", "streaming"]
    assert lines[2] == "attempts  1.50 a request (1 of 4 were tried again)"
    assert lines[-1] == "decode-0: no KV moves: reset"
    header, row = (line.split("  ") for line in lines[-3:-1])
    assert [cell for cell in header if cell][:3] == ["WORKER", "ROLE", "STATE"]
    cells = [cell.strip() for cell in row if cell.strip()]
    assert cells[-11] == "nixl/ucx (cma)"
    assert cells[-10:] == ["2", "0", "1", "90", "10", "-", "-", "-", "100", "3"]


def test_empty_cluster_is_said() -> None:
    assert render(ClusterStatus())[-1] == "no workers"
    assert render(ClusterStatus())[2] == "attempts  no request has ended"
    assert "(not ready)" in render(ClusterStatus())[0]
