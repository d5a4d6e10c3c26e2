"""One HTTP request's generations, one a prompt, as one stream of deltas.

    prompts -> Dispatcher.start (one stream each) -> updates -> Sample -> (choice index, Delta)...

Whatever happens, `close` ends every stream, so that workers free what they hold for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import RequestError
from core.lifetime import Duration, RequestTrace, Stamp
from core.request import FinishReason, TokenUpdate
from router.api.answers import Delta, Prompt, Usage
from router.dispatch.interface import TokenStream
from router.web.arrivals import arrivals_of
from router.web.context import ApiContext
from router.web.prepare import Prepared
from router.web.sample import Sample

Deltas = list[tuple[int, Delta]]
"""(choice index, what it got); choices are numbered through all prompts."""


class Generation:
    """Starts every prompt; take `next_deltas` to the end, then `close` (after an error too).

    Attributes:
        samples: one a choice.

    Raises:
        RequestError: not all prompts could be started; those that were are ended again.
    """

    def __init__(self, context: ApiContext, prepared: Prepared) -> None:
        self.prepared = prepared
        self._clock = context.clock
        self._metrics = context.metrics.of_model(prepared.model.name)
        self._num_samples = prepared.params.sampling.n
        self.samples = [
            Sample(context.text, prepared.params, request.request)
            for request in prepared.requests
            for _ in range(self._num_samples)
        ]
        self._open = set(range(len(prepared.requests)))
        self._started: set[int] = set()
        self._streams: list[TokenStream] = []
        try:
            for request, lifetime in zip(prepared.requests, prepared.lifetimes, strict=True):
                self._streams.append(context.dispatcher.start(request, lifetime))
        finally:
            if len(self._streams) < len(prepared.requests):
                self._end_open(FinishReason.ERROR)
        self._arrivals = arrivals_of(self._streams)

    @property
    def has_finished(self) -> bool:
        """Whether every sample has its finish reason."""
        return not self._open

    def prompt_of(self, index: int) -> Prompt:
        """Return a choice's prompt; its log-probabilities are there once the choice has tokens."""
        at = index // self._num_samples
        return Prompt(
            token_ids=self.prepared.requests[at].request.prompt,
            echo=self.prepared.echoes[at],
            logprobs=tuple(self._streams[at].prompt_logprobs),
        )

    def usage(self) -> Usage:
        """Return the tokens so far."""
        traces = self.traces()
        return Usage(
            prompt_tokens=self.prepared.num_prompt_tokens,
            completion_tokens=sum(sample.num_tokens for sample in self.samples),
            cached_tokens=sum(trace.cached_tokens for trace in traces if trace is not None),
        )

    def traces(self) -> list[RequestTrace | None]:
        """Return each prompt's path, None where no worker told it yet."""
        return [stream.trace for stream in self._streams]

    async def next_deltas(self) -> Deltas | None:
        """Return what comes together next; None once every sample has ended.

        Raises:
            RequestError: a prompt cannot be finished.
        """
        while self._open:
            prompt_index, updates = await self._arrivals.take()
            if updates is not None:
                return self._take(prompt_index, updates)
            self._require_end(prompt_index)
        return None

    def _require_end(self, prompt_index: int) -> None:
        if prompt_index in self._open:
            msg = "the generation ended before it was complete"
            raise RequestError(msg, status=500, code="generation_failed")

    def _take(self, prompt_index: int, updates: Sequence[TokenUpdate]) -> Deltas:
        now = self._clock.now()
        base = prompt_index * self._num_samples
        stream = self._streams[prompt_index]
        deltas: Deltas = []
        for update in updates:
            if update.finish_reason is not None:
                _refuse_failure(update.finish_reason)
            index = base + update.sample_index
            sample = self.samples[index]
            delta = sample.feed(update)
            if delta is None:
                continue
            if update.token_ids:
                self._observe_arrival(prompt_index, sample, now)
            if sample.ended_by_text:
                stream.finish_sample(update.sample_index)
            deltas.append((index, delta))
            if delta.finish_reason is not None:
                self._end_if_complete(prompt_index)
        return deltas

    def _end_if_complete(self, prompt_index: int) -> None:
        base = prompt_index * self._num_samples
        reasons = [one.finish_reason for one in self.samples[base : base + self._num_samples]]
        if None not in reasons:
            self._end(prompt_index, reasons[0] or FinishReason.STOP)

    def _observe_arrival(self, prompt_index: int, sample: Sample, now: float) -> None:
        if sample.last_arrival is None:
            self._observe_first(prompt_index, now)
        else:
            self._metrics.inter_token.observe(now - sample.last_arrival)
        sample.last_arrival = now

    def _observe_first(self, prompt_index: int, now: float) -> None:
        if prompt_index in self._started:
            return  # its other samples' first tokens
        self._started.add(prompt_index)
        lifetime = self.prepared.lifetimes[prompt_index]
        lifetime.stamp(Stamp.FIRST_TOKEN, now)
        seconds = lifetime.seconds(Duration.TTFT)
        if seconds is not None:
            self._metrics.ttft.observe(seconds)

    def _end(self, prompt_index: int, reason: FinishReason) -> None:
        """A prompt is over: let go of it, and count it once."""
        self._open.discard(prompt_index)
        lifetime = self.prepared.lifetimes[prompt_index]
        lifetime.stamp(Stamp.FINISHED, self._clock.now())
        self._metrics.ended(reason)
        if prompt_index >= len(self._streams):
            return
        self._streams[prompt_index].abort()
        base = prompt_index * self._num_samples
        request = self.prepared.requests[prompt_index].request
        generated = [one.num_tokens for one in self.samples[base : base + self._num_samples]]
        self._metrics.observe_sizes(request.sampling, len(request.prompt), generated)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._metrics.observe_times(lifetime, self._streams[prompt_index].trace)

    def close(self, reason: FinishReason) -> None:
        """End what is still open, for this reason; idempotent."""
        self._arrivals.close()
        self._end_open(reason)

    def _end_open(self, reason: FinishReason) -> None:
        for prompt_index in sorted(self._open):
            self._end(prompt_index, reason)


def _refuse_failure(reason: FinishReason) -> None:
    """A failed generation is never a 200: workers' `error` and a foreign `abort` are errors."""
    if reason is FinishReason.ERROR:
        msg = "the generation failed on its worker"
        raise RequestError(msg, status=500, code="generation_failed")
    if reason is FinishReason.ABORT:
        msg = "the generation was cancelled"
        raise RequestError(msg, status=503, code="generation_cancelled")
