"""A real cluster that is ready, as tests use it."""

from __future__ import annotations

from collections.abc import Callable

from openai import OpenAI

from tests.launched import Launched

START_TIMEOUT_S = 60.0
"""Generous: the machine that tests run on may be busy. What a start may take is a benchmark."""


class Cluster:
    """One `dovetail up` that is ready.

    Attributes:
        url: of the router, without `/v1`.
        model: name of the served model.
        launched: the launcher's process and its lines.
    """

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        ready = launched.wait_for(r"^ready +(\S+)/v1 +serves (\S+),", START_TIMEOUT_S)
        self.url, self.model = ready[1], ready[2]

    def client(self) -> OpenAI:
        """Return the official client, pointed here; it retries nothing."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def pid(self, component: str) -> int:
        """Return the process id that `component` ("prefill-0", "router", "etcd") had last."""
        lines = [line.split() for line in self.launched.out]
        pids = [int(line[3]) for line in lines if line[:3] == [component, "ready", "pid"]]
        return pids[-1]


Up = Callable[..., Cluster]
