"""The engine by itself: decode and prefill tokens a second, without network or fabric.

One engine in this process, on the default model and both cores. Decoding is timed from the step at
which all sequences generate; every prompt is fresh, so that the radix cache gives nothing away.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator

from bench.figures import Figure, figure
from bench.interleave import interleave
from core.clock import SystemClock
from core.config import Config, EngineConfig
from core.ids import RequestId
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from deploy.model_path import resolve_model
from deploy.worker.replica import load_executor, make_engine, plan_replica
from engine.engine import Engine
from engine.events import Generated, Mode
from kv_transfer.region import HostRegion

BATCHES = (1, 8, 32)
CONTEXTS = (16, 512)
THREADS = 2
STEPS = 10
"""Decode steps a sample; the context grows by so many tokens while it is taken."""
ROUNDS = 3

_CONFIG = Config(engine=EngineConfig(threads=THREADS, kv_memory=2 << 30))


def run() -> Iterator[Figure]:
    """Yield tokens a second of both phases for every batch and context."""
    plan = plan_replica(_CONFIG, resolve_model(""))
    with contextlib.closing(HostRegion(plan.num_blocks * plan.layout.block_bytes)) as region:
        executor = load_executor(_CONFIG, plan, resolve_model(""), region)
        with contextlib.closing(make_engine(_CONFIG, plan, executor)) as engine:
            kv = plan.layout.layers[0].dtype.value
            named = f"{THREADS} threads, weights {_CONFIG.engine.weights}, KV {kv}"
            timed = _TimedEngine(engine, plan.spec.vocab_size)
            for context in CONTEXTS:
                contenders: dict[str, Callable[[int], float]] = {}
                for batch in BATCHES:
                    row = f"batch_{batch}.context_{context}"
                    contenders[f"decode.{row}"] = timed.decoding(batch, context)
                    contenders[f"prefill.{row}"] = timed.prefilling(batch, context)
                for name, samples in interleave(contenders, ROUNDS).items():
                    yield figure(f"engine.{name}", samples, "tokens/s", against=named)


class _TimedEngine:
    """Runs batches to their end, one at a time, and times a part of each."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._dice = random.Random(0)  # noqa: S311 - prompts, not secrets
        self._ids = itertools.count()
        self._clock = SystemClock()

    def decoding(self, batch: int, context: int) -> Callable[[int], float]:
        """Return what measures generated tokens a second of a full batch."""

        def measure(_: int) -> float:
            # Chunks of later prompts hold back earlier sequences for some steps.
            spare = batch * context // _CONFIG.engine.chunk_tokens + 2
            requests = self._add(batch, context, max_tokens=STEPS + spare + 2)
            waiting = set(requests)
            while waiting:
                waiting -= self._step()
            started = self._clock.now()
            num_tokens = sum(len(self._step()) for _ in range(STEPS))
            seconds = self._clock.now() - started
            self._finish(requests)
            assert num_tokens == STEPS * batch
            return num_tokens / seconds

        return measure

    def prefilling(self, batch: int, context: int) -> Callable[[int], float]:
        """Return what measures prompt tokens a second until all first tokens are out."""

        def measure(_: int) -> float:
            requests = self._add(batch, context, max_tokens=1)
            waiting = set(requests)
            started = self._clock.now()
            while waiting:
                waiting -= self._step()
            seconds = self._clock.now() - started
            self._finish(requests)
            return batch * context / seconds

        return measure

    def _add(self, batch: int, context: int, *, max_tokens: int) -> list[RequestId]:
        requests = [RequestId(f"bench-{next(self._ids)}") for _ in range(batch)]
        for request_id in requests:
            prompt = tuple(self._dice.randrange(1000, self._vocab_size) for _ in range(context))
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
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
