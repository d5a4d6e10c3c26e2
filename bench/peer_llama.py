"""llama.cpp as a child of the engine benchmark, by llama-cpp-python, in its own environment.

`python -m bench.peer_llama MODEL.gguf THREADS`. Each sequence has its own cache, as with us; decode
rounds roll it back instead of computing the prompts again. Sampling is left out, to its favour.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import llama_cpp as llama  # pyright: ignore[reportMissingImports] - in its own environment

from bench.engine_child import STEPS, Task, serve

_MAX_SEQUENCES = 32
_ROOM = 64


class TimedLlama:
    """One model; one context a task."""

    def __init__(self, path: str, threads: int) -> None:
        llama.llama_backend_init()
        parameters = llama.llama_model_default_params()
        parameters.use_mmap = True
        self._model: Any = llama.llama_model_load_from_file(path.encode(), parameters)
        assert self._model, path
        self._threads = threads
        self._dice = random.Random(0)  # noqa: S311 - prompts, not secrets
        self._vocab_size: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._contexts: dict[Task, Any] = {}

    def measure(self, task: Task) -> tuple[int, float]:
        """Return tokens and seconds."""
        context = self._contexts.get(task)
        if context is None:
            context = self._contexts[task] = self._open(task)
        return (
            self._prefill(context, task) if task.phase == "prefill" else self._decode(context, task)
        )

    def _open(self, task: Task) -> Any:
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = task.batch * (task.context + _ROOM)
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_seq_max = task.batch
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.kv_unified = False
        context: Any = llama.llama_init_from_model(self._model, parameters)
        assert context, task
        if task.phase == "decode":
            for sequence in range(task.batch):
                self._compute(context, self._tokens(task.context), sequence)
        return context

    def _prefill(self, context: Any, task: Task) -> tuple[int, float]:
        llama.llama_memory_clear(llama.llama_get_memory(context), False)
        tokens = self._tokens(task.context)
        started = time.perf_counter()
        self._compute(context, tokens, 0)
        llama.llama_synchronize(context)
        return task.context, time.perf_counter() - started

    def _decode(self, context: Any, task: Task) -> tuple[int, float]:
        memory = llama.llama_get_memory(context)
        for sequence in range(task.batch):
            llama.llama_memory_seq_rm(memory, sequence, task.context, -1)
        batch: Any = llama.llama_batch_init(task.batch, 0, 1)
        seconds = 0.0
        for step in range(STEPS + 1):  # the first warms up, as ours was warmed by the prefill
            batch.n_tokens = task.batch
            for index, token in enumerate(self._tokens(task.batch)):
                _put(batch, index, token, task.context + step, index, wanted=True)
            started = time.perf_counter()
            assert llama.llama_decode(context, batch) == 0
            llama.llama_synchronize(context)
            seconds += time.perf_counter() - started if step else 0.0
        llama.llama_batch_free(batch)
        return STEPS * task.batch, seconds

    def _compute(self, context: Any, tokens: list[int], sequence: int) -> None:
        batch: Any = llama.llama_batch_init(512, 0, 1)
        for first in range(0, len(tokens), 512):
            part = tokens[first : first + 512]
            batch.n_tokens = len(part)
            for index, token in enumerate(part):
                wanted = first + index == len(tokens) - 1
                _put(batch, index, token, first + index, sequence, wanted=wanted)
            assert llama.llama_decode(context, batch) == 0
        llama.llama_batch_free(batch)

    def _tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(1000, self._vocab_size) for _ in range(count)]


def _put(batch: Any, at: int, token: int, position: int, sequence: int, *, wanted: bool) -> None:
    batch.token[at] = token
    batch.pos[at] = position
    batch.n_seq_id[at] = 1
    batch.seq_id[at][0] = sequence
    batch.logits[at] = wanted


if __name__ == "__main__":
    serve(TimedLlama(sys.argv[1], int(sys.argv[2])).measure)
