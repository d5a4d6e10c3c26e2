"""What a decode step costs beside its arithmetic: the time from one call into the native library to
the next, at batch 32.

With one step in flight all of it is waited for. With two, on a core of its own, the host schedules
the next step while the library computes; what is left between the calls is what is not hidden.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest import mock

import msgspec

from bench.engine_child import STEPS, Task
from bench.engine_ours import TimedEngine
from bench.figures import Figure, figure
from bench.interleave import interleave, ratios
from core.clock import SystemClock
from core.config import Config, EngineConfig
from deploy.model_path import resolve_model
from deploy.worker.replica import load_executor, make_engine, plan_replica
from engine.executor.native_runner import NativeRunner
from kv_transfer.region import HostRegion

ROUNDS = 9
AIM_MS = 0.5
HIDDEN = 0.4
_TASK = Task("decode", 32, 512)
_CLOCK = SystemClock()


def run() -> Iterator[Figure]:
    """Yield milliseconds between the native calls of a step, and what two steps in flight leave."""
    with contextlib.ExitStack() as stack:
        calls = stack.enter_context(_timed_calls())
        both = _sampler(calls, stack.enter_context(_engine(threads=2, max_inflight=1)))
        contenders = {
            f"max_inflight_{number}": _sampler(
                calls, stack.enter_context(_engine(threads=1, max_inflight=number))
            )
            for number in (1, 2)
        }
        share = interleave({"python": both}, ROUNDS)["python"]
        yield figure(
            "step.python", share, "ms a step", against=f"{_TASK.name}, 2 threads", at_most=AIM_MS
        )
        samples = interleave(contenders, ROUNDS)
    for name, values in samples.items():
        yield figure(f"step.exposed.{name}", values, "ms a step", against="1 thread, 2 cores")
    left = ratios(samples, "max_inflight_2", "max_inflight_1")
    yield figure("step.exposed.ratio", left, "ratio", against="max_inflight_1", at_most=HIDDEN)


class _Calls:
    """When the library computed: spans of forward passes and of draws, in turn."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = _CLOCK.now()
            result = call(*arguments)
            self.spans.append((started, _CLOCK.now()))
            return result

        return timed

    def between_ms(self) -> float:
        """Return the median of the last steps' time outside the library, in milliseconds."""
        spans = self.spans[-2 * STEPS :]
        starts = spans[::2]
        gaps = [
            1e3 * (after[0] - forward[1] - (draw[1] - draw[0]))
            for forward, draw, after in zip(starts, spans[1::2], starts[1:], strict=False)
        ]
        return statistics.median(gaps)


@contextlib.contextmanager
def _timed_calls() -> Generator[_Calls]:
    calls = _Calls()
    with (
        mock.patch.object(NativeRunner, "forward", calls.around(NativeRunner.forward)),
        mock.patch.object(NativeRunner, "draw", calls.around(NativeRunner.draw)),
    ):
        yield calls


def _sampler(calls: _Calls, engine: TimedEngine) -> Callable[[int], float]:
    def measure(_: int) -> float:
        calls.spans.clear()
        engine.measure(_TASK)
        return calls.between_ms()

    return measure


@contextlib.contextmanager
def _engine(*, threads: int, max_inflight: int) -> Generator[TimedEngine]:
    choices = {"threads": threads, "max_inflight": max_inflight, "kv_memory": 1 << 30}
    config = Config(engine=msgspec.convert(choices, EngineConfig))
    model = resolve_model("")
    plan = plan_replica(config, model)
    with contextlib.closing(HostRegion(plan.num_blocks * plan.layout.block_bytes)) as region:
        executor = load_executor(config, plan, model, region)
        with contextlib.closing(make_engine(config, plan, executor)) as engine:
            yield TimedEngine(engine, plan.spec.vocab_size)
