"""Our engine as a child of the engine benchmark: `python -m bench.engine_ours MODEL WEIGHTS KV`."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import msgspec

from bench.engine_child import STEPS, Task, serve
from core.clock import SystemClock
from core.config import Config, EngineConfig
from core.ids import RequestId
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from deploy.worker.replica import load_executor, make_engine, plan_replica
from engine.engine import Engine
from engine.events import Generated, Mode
from kv_transfer.region import HostRegion

THREADS = 2
_CHUNK_TOKENS = 512


class TimedEngine:
    """Runs batches to their end, one at a time, and times a part of each."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._dice = random.Random(0)  # noqa: S311 - prompts, not secrets
        self._ids = itertools.count()
        self._clock = SystemClock()
        self._prompts: dict[Task, list[tuple[int, ...]]] = {}

    def measure(self, task: Task) -> tuple[int, float]:
        """Return tokens and seconds."""
        return self._prefill(task) if task.phase == "prefill" else self._decode(task)

    def _decode(self, task: Task) -> tuple[int, float]:
        """The prompts of a task are the same each time: the prefix cache spares their prefill."""
        if task not in self._prompts:
            self._prompts[task] = [self._prompt(task.context) for _ in range(task.batch)]
        # Chunks of later prompts hold back earlier sequences for some steps.
        spare = task.batch * task.context // _CHUNK_TOKENS + 2
        requests = self._add(self._prompts[task], max_tokens=STEPS + spare + 2)
        waiting = set(requests)
        while waiting:
            waiting -= self._step()
        started = self._clock.now()
        num_tokens = sum(len(self._step()) for _ in range(STEPS))
        seconds = self._clock.now() - started
        self._finish(requests)
        assert num_tokens == STEPS * task.batch
        return num_tokens, seconds

    def _prefill(self, task: Task) -> tuple[int, float]:
        requests = self._add([self._prompt(task.context)], max_tokens=1)
        waiting = set(requests)
        started = self._clock.now()
        while waiting:
            waiting -= self._step()
        seconds = self._clock.now() - started
        self._finish(requests)
        return task.context, seconds

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._dice.randrange(1000, self._vocab_size) for _ in range(length))

    def _add(self, prompts: list[tuple[int, ...]], *, max_tokens: int) -> list[RequestId]:
        requests = [RequestId(f"bench-{next(self._ids)}") for _ in prompts]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        for request_id, prompt in zip(requests, prompts, strict=True):
            self._engine.add(EngineRequest(request_id, prompt, sampling), Mode.LOCAL)
        return requests

    def _step(self) -> set[RequestId]:
        """Run a step; return who has a new token."""
        return {event.request_id for event in self._engine.step() if isinstance(event, Generated)}

    def _finish(self, requests: list[RequestId]) -> None:
        for request_id in requests:
            self._engine.abort(request_id)
        while self._engine.has_work():
            self._engine.step()


def main() -> None:
    """Load the model, then measure what the parent asks for."""
    model, weights, kv = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    choices: dict[str, Any] = {"weights": weights, "kv_dtype": kv}
    engine_config = msgspec.convert(
        {"threads": THREADS, "kv_memory": 3 << 30, "chunk_tokens": _CHUNK_TOKENS, **choices},
        EngineConfig,
    )
    config = Config(engine=engine_config)
    plan = plan_replica(config, model)
    with contextlib.closing(HostRegion(plan.num_blocks * plan.layout.block_bytes)) as region:
        executor = load_executor(config, plan, model, region)
        with contextlib.closing(make_engine(config, plan, executor)) as engine:
            serve(TimedEngine(engine, plan.spec.vocab_size).measure)


if __name__ == "__main__":
    main()
