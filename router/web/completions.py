"""/v1/chat/completions and /v1/completions: one request from its bytes to its last event.

    body -> fields -> template, tokens -> Generation -> Delta -> spliced bytes

The server says when the client leaves, and that cancels the work. A request that ends in any way
ends its generation, at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from core.errors import RequestError
from core.lifetime import Lifetime, Stamp
from core.request import FinishReason
from router.api.answers import DONE, AnswerFormat, Choice, Delta
from router.api.fields import parse_body, shown
from router.api.generation_params import Vocabulary
from router.api.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from router.dispatch.interface import Disaggregate
from router.web.asgi import (
    JSON,
    WHEN_GONE,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    check_json_content,
    header,
    read_body,
    send_bytes,
)
from router.web.context import ApiContext
from router.web.errors import error_body, error_event, error_headers, internal_error
from router.web.event_stream import EventStream
from router.web.generation import Deltas, Generation
from router.web.metrics import State
from router.web.path_trace import trace_object
from router.web.prepare import Prepared, Wishes, prepare

_log = logging.getLogger(__name__)

WhenGone = Callable[[Callable[[], None] | None], None]
Read = Callable[[Mapping[str, Any], Vocabulary], ChatRequest | CompletionRequest]

READERS: Mapping[str, Read] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
}


class CompletionsEndpoint:
    """A raw ASGI route. Keeps its tasks, so that a stop can end them."""

    def __init__(self, context: ApiContext, read: Read) -> None:
        self._context = context
        self._read = read
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every answer, refusals too, leaves from here."""
        body = await read_body(scope, receive, self._context.config.http.max_body_bytes)
        exchange = _Exchange(self._context, self._read, scope, send)
        work = asyncio.current_task()
        assert work is not None

        def cancel() -> None:
            if not exchange.has_answered:
                work.cancel(_CLIENT_GONE)

        when_gone: WhenGone = scope[WHEN_GONE]
        when_gone(cancel)
        self._tasks.add(work)
        try:
            await exchange.run(body)
        except asyncio.CancelledError as cancelled:
            if _CLIENT_GONE not in cancelled.args:
                raise
            work.uncancel()
            raise ClientGone from None
        finally:
            when_gone(None)
            self._tasks.discard(work)

    def abort_all(self) -> None:
        """End what is running; a stop's patience is over."""
        for task in self._tasks:
            task.cancel(_STOPPING)


_NO_WISHES = Wishes()
_STOPPING = "the router stops"
_CLIENT_GONE = "the client is gone"


class _Exchange:
    """One request and its answer.

    Attributes:
        has_answered: the whole answer was given to the server, or the last of it is being given.
    """

    def __init__(self, context: ApiContext, read: Read, scope: Scope, send: Send) -> None:
        self._context = context
        self._read = read
        self._scope = scope
        self._send = send
        self._name: str = scope["dovetail.request_id"]
        self._state: State = "preparing"
        self._stream: EventStream | None = None
        self.has_answered = False

    async def run(self, body: bytes) -> None:
        counts = self._context.metrics.num_by_state
        counts[self._state] += 1
        try:
            await self._serve(body)
        except RequestError as error:
            await self._fail(error)
        except asyncio.CancelledError as cancelled:
            if _STOPPING in cancelled.args:
                await self._fail(RequestError(_STOPPING, status=503, code="stopping"))
            raise
        except Exception:  # noqa: BLE001 - the border: a 500 for the client, the trace for the log
            _log.exception("a request failed", extra={"request_id": self._name})
            await self._fail(internal_error())
        finally:
            self._context.metrics.num_by_state[self._state] -= 1

    def _enter(self, state: State) -> None:
        counts = self._context.metrics.num_by_state
        counts[self._state] -= 1
        counts[state] += 1
        self._state = state

    async def _fail(self, error: RequestError) -> None:
        """Before the head went out an error has its status; after, it is the last event; and where
        the end of the answer waits for its client, it comes too late to be told."""
        if self.has_answered:
            return
        self.has_answered = True
        if self._stream is not None and self._stream.has_started:
            await self._stream.write(error_event(error), last=True)
            return
        await send_bytes(self._send, error.status, error_body(error), error_headers(error))

    async def _serve(self, body: bytes) -> None:
        context = self._context
        arrived = context.clock.now()
        check_json_content(self._scope)
        fields = parse_body(body)
        request = self._read(fields, context.vocabulary)
        headers = self._ignored_headers(request.params.ignored, fields)
        prepared = await self._prepare(request, arrived)
        self._enter("waiting")
        answer = AnswerFormat(
            prepared.shape,
            prepared.params,
            request_id=self._name,
            created=int(context.clock.wall()),
            model=prepared.model.name,
            token_of=context.text.token,
        )
        generation = Generation(context, prepared)
        reason = FinishReason.ABORT
        try:
            if prepared.params.stream:
                await self._answer_stream(generation, answer, headers)
            else:
                await self._answer_whole(generation, answer, headers)
        except Exception:
            reason = FinishReason.ERROR
            raise
        finally:
            generation.close(reason)

    def _ignored_headers(self, ignored: tuple[str, ...], fields: Mapping[str, Any]) -> Headers:
        if not ignored:
            return ()
        if self._context.config.api.unknown_fields == "reject":
            name = ignored[0]
            msg = f"{name} = {shown(fields.get(name))}: unknown field; leave it out"
            raise RequestError(msg, param=name, code="unknown_parameter")
        self._context.metrics.ignored_fields.inc(len(ignored))
        names = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in ignored)
        safe = "".join(char if char.isprintable() else "?" for char in names)[:1024]
        _log.info("unknown fields ignored: %s", safe, extra={"request_id": self._name})
        return [(b"x-dovetail-ignored", safe.encode())]

    async def _prepare(self, request: ChatRequest | CompletionRequest, arrived: float) -> Prepared:
        num_prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
        lifetimes = [Lifetime() for _ in range(num_prompts)]
        for lifetime in lifetimes:
            lifetime.stamp(Stamp.ARRIVED, arrived)
        names = [self._context.request_names.new(self._name) for _ in lifetimes]
        return await prepare(self._context, request, self._wishes(), names, lifetimes)

    def _wishes(self) -> Wishes:
        if not self._context.debug_headers:
            return _NO_WISHES
        wish = header(self._scope, b"x-dovetail-disaggregate") or "auto"
        trace = header(self._scope, b"x-dovetail-trace") == "1"
        if wish == "auto" and not trace:
            return _NO_WISHES
        if wish not in tuple(Disaggregate):
            msg = f"x-dovetail-disaggregate = {wish!r}: must be auto, always or never"
            raise RequestError(msg, param="x-dovetail-disaggregate", code="invalid_value")
        return Wishes(Disaggregate(wish), trace)

    # -- streams ---------------------------------------------------------------------------------

    async def _answer_stream(
        self, generation: Generation, answer: AnswerFormat, headers: Headers
    ) -> None:
        config = self._context.config.http
        stream = EventStream(self._send, self._context.clock, config.keepalive_comment_s, headers)
        self._stream = stream
        stream.keep_alive()
        try:
            await self._write_events(stream, generation, answer)
        finally:
            stream.close()

    async def _write_events(
        self, stream: EventStream, generation: Generation, answer: AnswerFormat
    ) -> None:
        params = generation.prepared.params
        started: set[int] = set()
        parts: list[bytes] = []
        while (deltas := await generation.next_deltas()) is not None:
            if self._state == "waiting":
                self._enter("streaming")
            parts = self._chunks(generation, answer, deltas, started)
            if parts and not generation.has_finished:
                await stream.write(b"".join(parts))
        if params.include_usage:
            parts.append(answer.usage_chunk(generation.usage(), self._trace(generation)))
        self.has_answered = True
        await stream.write(b"".join([*parts, DONE]), last=True)

    def _chunks(
        self, generation: Generation, answer: AnswerFormat, deltas: Deltas, started: set[int]
    ) -> list[bytes]:
        params = generation.prepared.params
        last = len(deltas) - 1 if generation.has_finished and not params.include_usage else None
        parts: list[bytes] = []
        for at, (index, delta) in enumerate(deltas):
            if index not in started:
                started.add(index)
                parts.append(answer.first_chunk(index, generation.prompt_of(index)))
            usage = generation.usage() if params.continuous_usage else None
            trace = self._trace(generation) if at == last else None
            parts.append(answer.chunk(index, delta, usage=usage, trace=trace))
        return parts

    def _trace(self, generation: Generation) -> dict[str, Any] | None:
        prepared = generation.prepared
        if not prepared.wishes.trace:
            return None
        return trace_object(generation.traces(), prepared.lifetimes)

    # -- whole answers ---------------------------------------------------------------------------

    async def _answer_whole(
        self, generation: Generation, answer: AnswerFormat, headers: Headers
    ) -> None:
        collected = [_Collected() for _ in generation.samples]
        while (deltas := await generation.next_deltas()) is not None:
            if self._state == "waiting":
                self._enter("streaming")
            for index, delta in deltas:
                collected[index].add(delta)
        choices = [
            Choice(position, collected[index].whole(), generation.prompt_of(index))
            for position, index in enumerate(_best(generation))
        ]
        body = answer.answer(choices, generation.usage(), self._trace(generation))
        self.has_answered = True
        await send_bytes(self._send, 200, body, [JSON, *headers])


class _Collected:
    """One choice's deltas, joined."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)

    def whole(self) -> Delta:
        deltas = self._deltas
        if len(deltas) == 1:
            return deltas[0]
        return Delta(
            "".join([delta.text for delta in deltas]),
            tuple(token_id for delta in deltas for token_id in delta.token_ids),
            tuple(entry for delta in deltas for entry in delta.logprobs),
            deltas[-1].finish_reason,
            deltas[-1].stop_reason,
        )


def _best(generation: Generation) -> list[int]:
    """Return the choices to show: of each prompt's samples the n of the highest log-probability per
    token (`best_of`), best first; all in order where no more were generated."""
    params = generation.prepared.params
    count = params.sampling.n
    indices = range(len(generation.samples))
    if count == params.n:
        return list(indices)
    best: list[int] = []
    for base in range(0, len(indices), count):
        ranked = sorted(
            range(base, base + count),
            key=lambda index: generation.samples[index].mean_logprob,
            reverse=True,
        )
        best += ranked[: params.n]
    return best
