"""What every handler shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from core.addresses import is_loopback
from core.clock import Clock
from core.config import Config
from router.api.generation_params import Vocabulary
from router.dispatch.interface import Dispatcher, ServedModel
from router.entropy import Entropy
from router.text.text_model import TextModel
from router.web.metrics import RouterMetrics
from router.web.request_ids import RequestNames

_P = ParamSpec("_P")
_R = TypeVar("_R")

LONG_TEXT_CHARS = 2048
"""Longer texts are tokenized on a thread; below, the hop costs more than the work (0.3 ms)."""

_TOKENIZER_THREADS = 2


class ApiContext:
    """The router's HTTP side, wired.

    Attributes:
        debug_headers: whether `x-dovetail-trace` and `x-dovetail-disaggregate` work.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        text: TextModel,
        config: Config,
        clock: Clock,
        metrics: RouterMetrics,
    ) -> None:
        self.dispatcher = dispatcher
        self.text = text
        self.config = config
        self.clock = clock
        self.metrics = metrics
        self.entropy = Entropy()
        self.request_names = RequestNames()
        self.vocabulary = Vocabulary(text.vocab_size, text.eos_token_ids)
        choice = config.router.debug_headers
        self.debug_headers = choice == "on" or (choice == "auto" and is_loopback(config.http.host))
        self._threads = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")

    def model(self) -> ServedModel:
        """Return what the workers serve; while there is none, what this router's files say."""
        served = self.dispatcher.served_model()
        name = self.config.model.served_name
        if served is not None:
            return served
        return ServedModel(
            name=name or self.text.name,
            max_model_len=self.config.model.max_model_len or self.text.max_model_len,
            block_size=self.config.engine.block_size,
            model_fingerprint="",
        )

    async def off_loop(
        self, size: int, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Do work on text of `size` characters: here when it is short, else on a thread."""
        if size <= LONG_TEXT_CHARS:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
