"""Real clusters, started by the command that a user types and stopped as a user stops them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster import Cluster, Up
from tests.launched import Launched


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Start clusters: `up("--colocated", "1")`. Equal arguments within one module share one.

    At the module's end each is stopped with SIGTERM, and must end well and leave nothing.
    """
    program = str(Path(sys.executable).with_name("dovetail"))
    started: dict[tuple[str, ...], Cluster] = {}

    def starter(*arguments: str) -> Cluster:
        if arguments not in started:
            command = [program, "up", "--port", "0", *arguments]
            temporary = tmp_path_factory.mktemp("cluster")
            launched = stack.enter_context(Launched(command, temporary))
            started[arguments] = Cluster(launched)
        return started[arguments]

    with ExitStack() as stack:
        yield starter
        for cluster in started.values():
            cluster.close()
            if cluster.launched.process.poll() is None:
                code = cluster.launched.stop(signal.SIGTERM)
                assert code == 0, cluster.launched.transcript()
            cluster.launched.assert_nothing_left()
