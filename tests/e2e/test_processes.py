"""What a cluster's processes are, seen from outside: their logs, libraries and sockets."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

import psutil
import pytest

from tests.cluster import Cluster, Up

pytestmark = pytest.mark.e2e

SERVING = ("router", "prefill-0", "decode-0")


@pytest.fixture
def cluster(up: Up) -> Cluster:
    return up("--executor", "mock", "--log-format", "json", "--log-level", "info")


def ask(cluster: Cluster, request_id: str) -> None:
    """Have a prompt computed by one worker and decoded by the other."""
    answer = cluster.http.post(
        f"{cluster.url}/v1/completions",
        json={"prompt": [5] * 100, "max_tokens": 3, "cache_salt": request_id},
        headers={"x-request-id": request_id, "x-dovetail-disaggregate": "always"},
    )
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == request_id


def processes_with(cluster: Cluster, request_id: str) -> set[str]:
    """Return who wrote a log line of this request."""
    records = [json.loads(line) for line in cluster.launched.err if line.startswith("{")]
    return {one["process"] for one in records if one.get("request_id") == request_id}


def test_a_request_is_found_by_its_id_in_the_log_of_every_process(cluster: Cluster) -> None:
    ask(cluster, "find-me.1")
    cluster.launched.wait_until(lambda: processes_with(cluster, "find-me.1") >= {*SERVING})
    assert processes_with(cluster, "find-me.1") == {*SERVING}
    assert processes_with(cluster, "find-me") == set()


def test_a_client_may_repeat_an_id_while_it_is_in_use_and_after(cluster: Cluster) -> None:
    for _ in range(3):
        ask(cluster, "again")
    cluster.wait_until_idle()


def test_processes_of_the_mock_executor_load_no_torch(cluster: Cluster) -> None:
    ask(cluster, "warm")  # what is imported late is imported now
    for name in SERVING:
        loaded = Path(f"/proc/{cluster.pid(name)}/maps").read_text()
        assert "libpython" in loaded or "python" in loaded, "the right process"
        assert "torch" not in loaded, name


def test_no_socket_is_bound_to_more_than_loopback(cluster: Cluster) -> None:
    ask(cluster, "connect")  # the fabric's sockets are made with the first transfer
    processes = [psutil.Process(cluster.launched.process.pid), *cluster.launched.descendants()]
    assert {cluster.pid(name) for name in SERVING} <= {process.pid for process in processes}
    sockets = [
        (process.name(), *one.laddr)
        for process in processes
        for one in process.net_connections(kind="inet")
        if one.laddr
    ]
    assert len(sockets) > len(SERVING), "each listens"
    assert [one for one in sockets if not is_loopback(one[1])] == []


def is_loopback(host: object) -> bool:
    address = ipaddress.ip_address(str(host))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
