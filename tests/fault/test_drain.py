"""Workers that are told to leave under load: no stream fails, none is cut short."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.asked import Asked, prompt_of
from tests.cluster import PATIENT, Cluster
from tests.faults import deaths, process, statuses, until, wait_live
from tests.launched import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DOVETAIL = str(Path(sys.executable).with_name("dovetail"))
MOCK = (
    "--executor", "mock",
    "--set", "engine.chunk_tokens=128",
    "--set", "engine.kv_memory=67108864",
    "--set", "engine.mock_step_s=0.02",
    *PATIENT,
)  # fmt: skip

Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a cluster in which workers leave; at its end nothing is left of it."""
    with ExitStack() as stack:

        def starter(*arguments: str) -> Cluster:
            command = [DOVETAIL, "up", "--port", "0", *arguments]
            cluster = Cluster(stack.enter_context(Launched(command, tmp_path / "tmp")))
            stack.callback(cluster.close)
            started.append(cluster)
            return cluster

        started: list[Cluster] = []
        yield starter
        for cluster in started:
            assert cluster.launched.stop(signal.SIGTERM) == 0, cluster.launched.transcript()
            assert "is killed" not in cluster.launched.transcript()
            assert "Traceback" not in cluster.launched.transcript()
            cluster.launched.assert_nothing_left()


def drain(cluster: Cluster, worker: str, deadline: str = "60") -> None:
    """Run `dovetail drain`, which returns once the worker has left."""
    done = ordered(cluster, "drain", worker, "--deadline", deadline)
    assert done.returncode == 0, done.stderr
    assert f"{worker} has left" in done.stdout
    expect_left(cluster, worker)


def ordered(cluster: Cluster, *order: str) -> subprocess.CompletedProcess[str]:
    """Run `dovetail drain` or `dovetail role`."""
    command = [DOVETAIL, *order, "--url", cluster.url]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def expect_left(cluster: Cluster, worker: str) -> None:
    """Assert that a worker ended well, is not known any more, and is not started again."""
    cluster.launched.wait_for(f"^{worker} +left$")
    until(lambda: worker not in statuses(cluster), f"{worker} is forgotten")
    assert not deaths(cluster), cluster.launched.transcript()


def streams(cluster: Cluster, count: int, max_tokens: int) -> list[Asked]:
    """Return streams of which each has begun."""
    asked = [Asked(cluster.url, prompt_of(80 + 5 * at, at), max_tokens) for at in range(count)]
    for one in asked:
        one.wait_for_tokens(3)
    return asked


def samples_of(cluster: Cluster, seed: int) -> dict[str, Any]:
    """Return an answer of two samples, with all that depends on the tokens before."""
    body = {
        "prompt": prompt_of(150, 900 + seed),
        "max_tokens": 60,
        "n": 2,
        "logprobs": 2,
        "temperature": 0.9,
        "seed": seed,
        "frequency_penalty": 0.5,
    }
    answer = cluster.http.post(f"{cluster.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_decode_worker_hands_50_streams_over_and_leaves(start: Start) -> None:
    cluster = start("--prefill", "1", "--decode", "2", *MOCK)
    wait_live(cluster, "prefill-0", "decode-0", "decode-1")
    asked = streams(cluster, 50, 120)
    with ThreadPoolExecutor() as clients:
        samples = [clients.submit(samples_of, cluster, seed) for seed in range(4)]
        drain(cluster, "decode-0")
    for one in asked:
        one.expect_mock_answer()
    for seed, answer in enumerate(samples):
        undisturbed = samples_of(cluster, seed)
        assert answer.result()["choices"] == undisturbed["choices"]
        for count in ("prompt_tokens", "completion_tokens"):
            assert answer.result()["usage"][count] == undisturbed["usage"][count]
    moved = [one for one in asked if one.path["prefill_worker"] == "decode-0"]
    assert moved, "none got its prompt's KV from the worker that left"
    assert {one.path["decode_worker"] for one in moved} == {"decode-1"}
    Asked(cluster.url, prompt_of(200, 99), 8).expect_mock_answer()


def test_the_last_decode_worker_finishes_what_it_has(start: Start) -> None:
    """SIGTERM is a drain, too; of the prefill worker as of the decode worker."""
    cluster = start(*MOCK)
    wait_live(cluster, "prefill-0", "decode-0")
    for order in (("drain", "decode-0"), ("role", "decode-0", "prefill")):
        refused = ordered(cluster, *order)
        assert (refused.returncode, refused.stdout) == (2, "")
        (line,) = refused.stderr.splitlines()
        assert "decode-0 is the last worker that decodes; start another one first" in line
    asked = streams(cluster, 8, 100)
    late = [Asked(cluster.url, prompt_of(2000, 200 + at), 8) for at in range(3)]
    process(cluster, "prefill-0").send_signal(signal.SIGTERM)
    expect_left(cluster, "prefill-0")
    for one in late:
        one.expect_mock_answer()
    process(cluster, "decode-0").send_signal(signal.SIGTERM)
    until(lambda: statuses(cluster)["decode-0"]["state"] == "draining", "it drains")
    refused = Asked(cluster.url, prompt_of(50, 500), 8).end()
    assert refused.error is not None, refused.report()
    assert refused.status == 503
    for one in asked:
        one.expect_mock_answer()
    expect_left(cluster, "decode-0")


def test_roles_change_under_load(start: Start) -> None:
    """Decode to prefill and back, and to both: streams go on, and each role does its own work."""
    cluster = start("--prefill", "1", "--decode", "2", *MOCK)
    wait_live(cluster, "prefill-0", "decode-0", "decode-1")
    pid = cluster.pid("decode-0")
    asked = streams(cluster, 12, 100)
    switch(cluster, "decode-0", "prefill")
    process(cluster, "prefill-0").send_signal(signal.SIGTERM)
    expect_left(cluster, "prefill-0")
    handed = Asked(cluster.url, prompt_of(300, 700), 60, disaggregate="always")
    handed.wait_for_tokens(3)
    switch(cluster, "decode-0", "both")
    alone = [Asked(cluster.url, prompt_of(40, 800 + at), 8) for at in range(6)]
    for one in (*asked, handed, *alone):
        one.expect_mock_answer()
    assert (handed.path["prefill_worker"], handed.path["decode_worker"]) == ("decode-0", "decode-1")
    assert "colocated" in {one.path["decision"] for one in alone}
    assert statuses(cluster)["decode-0"]["pid"] == pid, "the process is the same"


def switch(cluster: Cluster, worker: str, role: str) -> None:
    """Run `dovetail role`, which returns once the worker has the role."""
    done = ordered(cluster, "role", worker, role)
    assert done.returncode == 0, done.stderr
    assert f"{worker} has role {role}" in done.stdout
