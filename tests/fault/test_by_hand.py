"""Each process started by hand, as on a cluster: etcd, two prefill and two decode workers, a
router. A prefill worker that is killed is not started again by anybody."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from control_plane.etcd.embedded import server_binary
from tests.asked import Asked, prompt_of
from tests.etcd_server import reserve_ports
from tests.faults import scrape, statuses, until, wait_idle, wait_live
from tests.launched import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PREFILLS = ("prefill-0", "prefill-1")
DECODES = ("decode-0", "decode-1")
SETTINGS = (
    "--executor", "mock",
    "--set", "engine.chunk_tokens=128",
    "--set", "engine.mock_prompt_token_s=0.0002",
    "--set", "kv_transfer.quarantine_s=1",
    "--set", "control_plane.lease_s=3",
)  # fmt: skip


@dataclass
class HandMade:
    """The cluster; a `tests.faults.Router`."""

    url: str
    http: httpx.Client
    launched: dict[str, Launched] = field(default_factory=dict)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[HandMade]:
    """Yield the cluster, ready; at the end each process is stopped with SIGTERM, and ends well."""
    with ExitStack() as stack:
        made = start_all(tmp_path, stack)

        def knows_workers() -> bool:
            for launched in made.launched.values():
                assert launched.process.poll() is None, launched.transcript()
            return bool(statuses(made))

        until(knows_workers, "the router knows workers")
        wait_live(made, *PREFILLS, *DECODES)
        yield made
        for name in ("router", *DECODES, *PREFILLS):
            launched = made.launched[name]
            if launched.process.poll() is None:
                assert launched.stop(signal.SIGTERM) == 0, launched.transcript()
            launched.assert_nothing_left()


def start_all(tmp_path: Path, stack: ExitStack) -> HandMade:
    """Start all, etcd last: nobody may depend on the order."""
    client_port, peer_port, http_port = reserve_ports(3, stack)
    etcd, peer = f"127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    dovetail = str(Path(sys.executable).with_name("dovetail"))
    shared = ["--etcd", etcd, *SETTINGS]
    commands = {
        "router": [dovetail, "router", "--etcd", etcd, "--port", str(http_port), *SETTINGS[2:]],
        **{name: [dovetail, "worker", "--role", "prefill", "--id", name, *shared]
           for name in PREFILLS},
        **{name: [dovetail, "worker", "--role", "decode", "--id", name, *shared]
           for name in DECODES},
        "etcd": [
            str(server_binary()), f"--data-dir={tmp_path / 'data'}", "--log-level=error",
            f"--listen-client-urls=http://{etcd}", f"--advertise-client-urls=http://{etcd}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ],
    }  # fmt: skip
    http = stack.enter_context(httpx.Client(trust_env=False, timeout=30))
    made = HandMade(f"http://127.0.0.1:{http_port}", http)
    for name, command in commands.items():
        made.launched[name] = stack.enter_context(Launched(command, tmp_path / name))
    return made


def test_requests_spread_and_survive_a_prefill_worker(cluster: HandMade) -> None:
    asked = [Asked(cluster.url, prompt_of(500 + 8 * i, i), 24) for i in range(24)]
    for one in asked:
        one.expect_mock_answer()
    assert {one.path["prefill_worker"] for one in asked} == set(PREFILLS)
    assert {one.path["decode_worker"] for one in asked} == set(DECODES)
    wait_idle(cluster, *PREFILLS, *DECODES)

    asked = [Asked(cluster.url, prompt_of(2000 + 8 * i, 100 + i), 24) for i in range(12)]

    def is_computing() -> bool:
        stages = scrape(cluster, "prefill-0").by_label("dovetail:prefill_attempts", "stage")
        return stages["computing"] > 0

    until(is_computing, "prefill-0 computes")
    psutil.Process(cluster.launched["prefill-0"].process.pid).kill()
    for one in asked:
        one.expect_mock_answer()
    wait_idle(cluster, "prefill-1", *DECODES)
    # The registry forgets the dead after its lease; routing has forgotten it before.
    after = [Asked(cluster.url, prompt_of(500, 200 + i), 8) for i in range(8)]
    for one in after:
        one.expect_mock_answer()
        assert one.path["prefill_worker"] == "prefill-1"
    wait_idle(cluster, "prefill-1", *DECODES)
    until(lambda: "prefill-0" not in statuses(cluster), "the dead worker is forgotten")
