"""The launcher with real workers under load: killed, stopped, and made to hurry."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from core.clock import SystemClock
from tests.asked import Asked, mock_answer, prompt_of
from tests.cluster import Cluster
from tests.faults import process, wait_live
from tests.launched import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Start = Callable[[], Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a cluster whose end is the test's own affair."""
    program = str(Path(sys.executable).with_name("dovetail"))
    command = [program, "up", "--port", "0", "--executor", "mock"]
    command += ["--set", "engine.mock_step_s=0.02"]

    def starter() -> Cluster:
        cluster = Cluster(stack.enter_context(Launched(command, tmp_path / "tmp")))
        stack.callback(cluster.close)
        wait_live(cluster, "prefill-0", "decode-0")
        return cluster

    with ExitStack() as stack:
        yield starter


def running(cluster: Cluster, max_tokens: int) -> list[Asked]:
    """Return streams of which each has begun."""
    asked = [Asked(cluster.url, prompt_of(200, i), max_tokens) for i in range(4)]
    for one in asked:
        one.wait_for_tokens(2)
    return asked


def test_killed_launcher_takes_all_with_it(start: Start) -> None:
    cluster = start()
    asked = running(cluster, 2000)
    children = cluster.launched.descendants()
    assert len(children) == 4
    cluster.launched.process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    for one in asked:
        assert one.end().failure, one.report()


def test_stop_lets_short_answers_finish_and_ends_long_ones_with_an_error(start: Start) -> None:
    cluster = start()
    long, short = running(cluster, 2000), running(cluster, 60)
    assert cluster.launched.stop(signal.SIGTERM) == 0
    for one in short:
        one.expect_mock_answer()
    for one in long:
        error = one.end().error
        assert error is not None, one.report()
        assert error["code"] in ("stopping", "shutting_down"), one.report()
        assert one.tokens == mock_answer(one.prompt, 2000)[: len(one.tokens)]
    assert "Traceback" not in cluster.launched.transcript()
    assert "is killed" not in cluster.launched.transcript(), "a worker did not hear of its stop"
    cluster.launched.assert_nothing_left()


def test_second_ctrl_c_does_not_wait_for_a_frozen_worker(start: Start) -> None:
    cluster = start()
    asked = running(cluster, 2000)
    process(cluster, "prefill-0").suspend()
    clock = SystemClock()
    began = clock.now()
    cluster.launched.process.send_signal(signal.SIGINT)
    cluster.launched.wait_for("^stopping ")
    assert cluster.launched.stop(signal.SIGINT) == 128 + signal.SIGINT
    assert clock.now() - began < 5.0
    for one in asked:
        assert one.end().failure or one.error, one.report()
    cluster.launched.assert_nothing_left()
