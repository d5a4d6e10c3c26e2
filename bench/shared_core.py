"""Decode while another process wants a core: two threads each, and three that would compute.

Small deployments share their machine. Where threads wait for each other at every op, one that has
lost its core holds all up; how much of the undisturbed speed is left is told beside the peers'.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from bench.engine import THREADS, start
from bench.engine_child import Child, Task
from bench.figures import Figure, figure
from bench.interleave import interleave
from deploy.model_path import resolve_model

ROUNDS = 5
_TASKS = (Task("decode", 1, 512), Task("decode", 8, 512))
_CONTENDERS = ("ours_native_kv8", "llama_q4_1", "llama_bf16", "vllm_f32")
_AT_LEAST = 2.0
"""Times the best peer's tokens a second."""


def run() -> Iterator[Figure]:
    """Yield tokens a second beside a busy process, and ours over the best peer's."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        every = start(resolve_model(""), directory, stack)
        children = {name: child for name, child in every.items() if name in _CONTENDERS}
        for task in _TASKS:
            contenders = {name: _sampler(child, task) for name, child in children.items()}
            samples = interleave(contenders, ROUNDS)
            for name, values in samples.items():
                what = f"shared_core.{task.name}.{name}"
                against = f"{THREADS} threads beside a busy process"
                yield figure(what, values, "tokens/s", against=against)
            ours, *peers = children
            if peers:
                best = max(peers, key=lambda name: statistics.median(samples[name]))
                ratio = [a / b for a, b in zip(samples[ours], samples[best], strict=True)]
                what = f"shared_core.{task.name}.ratio"
                yield figure(what, ratio, "ratio", against=best, at_least=_AT_LEAST)


def _sampler(child: Child, task: Task) -> Callable[[int], float]:
    def measure(number: int) -> float:
        del number
        with _busy():
            return child.tokens_per_s(task)

    return measure


@contextlib.contextmanager
def _busy() -> Generator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
