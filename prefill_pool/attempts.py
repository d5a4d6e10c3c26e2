"""All attempts of a prefill worker: feeds their state machines and does what these say.

    decode stream --ask, settle--> | prefill_side | --Compute, StopComputing, Release--> engine
    engine --admitted, computed--> |   (pure)     | --Push--> pusher --> fabric
    pusher --done, failed--------> |              | --Tell--> decode stream

The engine knows an attempt, not a request, by its own id: a retry may be computed here while the
writes of the attempt before it still hold their source blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from msgspec.structs import replace

from control_plane.rpc.interface import Stream
from core.clock import Clock
from core.errors import RequestError
from core.ids import Boot, HandoffId, RequestId
from core.messages import (
    HandoffFailed,
    HandoffProgress,
    HandoffScored,
    HandoffSettled,
    PrefillAsk,
)
from engine.engine_driver import EngineDriver
from engine.events import (
    Admitted,
    Computed,
    Event,
    Generated,
    Mode,
    Scored,
)
from kv_transfer.handoff import prefill_messages as p
from kv_transfer.handoff import prefill_side
from kv_transfer.handoff.agent_renewal import is_renewal_due
from kv_transfer.handoff.prefill_side import PrefillSide, PrefillTerms
from kv_transfer.handoff.tombstones import Tombstones
from kv_transfer.paths import Paths
from kv_transfer.transport import Poll, TransferState
from prefill_pool.pusher import Pusher
from prefill_pool.stats import PrefillStats

_log = logging.getLogger(__name__)

EXPECTED_S = 3.0
"""How long a request that moved away is waited for. Its next worker asks once it has blocks for it;
one that comes later, or never, computes the prompt itself or asks another."""

Later = Callable[[Callable[["Attempts"], None]], None]
"""Have the worker's task call a function of the attempts."""


@dataclass(slots=True)
class _Attempt:
    side: PrefillSide
    engine_id: RequestId
    stream: Stream[Any]


class Attempts:
    """Lives in the worker's task; every method runs there, but `expect`.

    Args:
        terms: what this worker offers; `refuse` changes it.
        later: called from callbacks on the loop.
        quarantine_s: patience with writes that do not end, see `is_renewal_due`.

    Attributes:
        paths: what its writes tell of the fabric.
        busy: set while there is something to do.
    """

    def __init__(
        self,
        terms: PrefillTerms,
        engine: EngineDriver,
        pusher: Pusher,
        *,
        later: Later,
        clock: Clock,
        quarantine_s: float,
    ) -> None:
        self._terms = terms
        self._engine = engine
        self._pusher = pusher
        self._later = later
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._attempts: dict[HandoffId, _Attempt] = {}
        self._handoffs: dict[RequestId, HandoffId] = {}
        self._streams: set[Stream[Any]] = set()
        self._tombstones = Tombstones()
        self._outcomes = Counter(dict.fromkeys(p.AttemptOutcome, 0))
        self._num_renewals = 0
        self._expected: dict[RequestId, float] = {}
        self._engine_at = clock.now()
        self.paths = Paths()
        self.busy = asyncio.Event()

    def __len__(self) -> int:
        return len(self._attempts)

    def refuse(self, reason: str) -> None:
        """Take no new ask from now on ("draining", "wrong_role"); "" takes them again."""
        self._terms = replace(self._terms, refusing=reason)

    def expect(self, request_id: RequestId) -> None:
        """A request that ran here goes on elsewhere: take one ask of it, for what the cache holds,
        though no other is taken.

        Called as it is stopped, in whatever task of the loop: a drain that looked before this was
        counted would end the process.
        """
        self._expected[request_id] = self._clock.now() + EXPECTED_S
        self.busy.set()

    @property
    def num_expected(self) -> int:
        """Requests that ran here and may yet be asked for."""
        return len(self._expected)

    # --- the decode worker says -------------------------------------------------------------

    def stream_opened(self, stream: Stream[Any]) -> None:
        """A decode worker connected, perhaps anew."""
        self._streams.add(stream)

    def asked(self, stream: Stream[Any], ask: PrefillAsk) -> None:
        """Take or refuse a prompt."""
        handoff = ask.handoff
        if handoff in self._attempts:
            # Not refused: a refusal would say that nothing is written to these blocks.
            stream.send(HandoffFailed(handoff, "an attempt of this name is under way"))
            extra = {"request_id": handoff.request_id}
            _log.error("handoff %s was asked for twice", handoff, extra=extra)
            return
        is_settled = handoff in self._tombstones
        now = self._clock.now()
        side, effects = prefill_side.receive(ask, self._terms_for(ask), now, is_settled=is_settled)
        if side is None:
            for effect in effects:
                self._refused(stream, effect)
            return
        extra = {"request_id": handoff.request_id}
        _log.info("%d prompt tokens for a peer", len(ask.request.prompt), extra=extra)
        attempt = _Attempt(side, RequestId(str(handoff)), stream)
        self._attempts[handoff] = attempt
        self._handoffs[attempt.engine_id] = handoff
        if len(self._attempts) == 1:
            self._engine_at = now  # it had nothing to do
        self.busy.set()
        self._do_all(attempt, effects)

    def _terms_for(self, ask: PrefillAsk) -> PrefillTerms:
        is_expected = self._expected.pop(ask.handoff.request_id, None) is not None
        return replace(self._terms, refusing="") if is_expected else self._terms

    def settle(self, stream: Stream[Any], handoff: HandoffId) -> None:
        """End an attempt; answer once nothing of it can land any more."""
        attempt = self._attempts.get(handoff)
        if attempt is not None:
            attempt.stream = stream  # the decode worker may have connected anew
            self._advance(attempt, p.SettleRequested())
        elif not self._tombstones.may_land(handoff):
            self._tombstones.place(handoff, self._clock.now(), may_land=False)
            stream.send(HandoffSettled(handoff))

    def stream_closed(self, stream: Stream[Any]) -> None:
        """Settle everything that was asked on a stream; nobody hears the answers."""
        self._streams.discard(stream)
        for attempt in list(self._attempts.values()):
            if attempt.stream is stream:
                self._advance(attempt, p.DecodeLost())
        self._close_unless_in_use(stream.peer.name, stream.peer.boot)

    def _close_unless_in_use(self, worker_id: str, boot: Boot) -> None:
        """Let go of the fabric's connection to a decode worker's life that has no stream and no
        attempt here: it ended, or will ask anew. Each would stay for ever else."""
        is_here = any(stream.peer.boot == boot for stream in self._streams)
        asks = (attempt.side.ask for attempt in self._attempts.values())
        if not is_here and not any(ask.region.boot == boot for ask in asks):
            self._pusher.forget(worker_id, boot)
            self.paths.forget(boot)

    # --- the engine says --------------------------------------------------------------------

    def engine_says(self, events: list[Event]) -> None:
        """Take the events of a step; those of requests that ended meanwhile change nothing."""
        for event in events:
            self._engine_says(event)

    def _engine_says(self, event: Event) -> None:
        match event:
            case Admitted():
                admitted = p.PromptAdmitted(event.block_ids, event.cached_tokens)
                self._by_engine_id(event.request_id, admitted)
            case Computed():
                self._by_engine_id(event.request_id, p.ChunkComputed(event.num_computed))
            case Generated(token_ids=(token_id, *_)):
                sampled = p.TokenSampled(
                    event.sample_index, token_id, event.logprobs, event.finish_reason
                )
                self._by_engine_id(event.request_id, sampled)
            case Scored():
                self._scored(event)
            case _:
                return  # the decode pool's: both hear the same engine

    def _scored(self, event: Scored) -> None:
        """Told as they come: each has its place in the prompt, whatever becomes of the attempt."""
        handoff = self._handoffs.get(event.request_id)
        if handoff is not None:
            self._attempts[handoff].stream.send(HandoffScored(handoff, event.logprobs))

    def _by_engine_id(self, engine_id: RequestId, event: p.Event) -> None:
        self._engine_at = self._clock.now()
        handoff = self._handoffs.get(engine_id)
        if handoff is not None:
            self._advance(self._attempts[handoff], event)

    # --- time -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let deadlines pass."""
        now = self._clock.now()
        self._tombstones.expire(now)
        for request_id in [name for name, until in self._expected.items() if now >= until]:
            del self._expected[request_id]
        self._rest_if_idle()
        for attempt in list(self._attempts.values()):
            self._advance(attempt, p.Tick())

    def tell_progress(self) -> None:
        """Tell decode workers of what waits or is computed, unless the engine stands still."""
        if self._clock.now() >= self._engine_at + self._terms.try_s:
            return
        working: dict[Stream[Any], list[HandoffId]] = {}
        for handoff, attempt in self._attempts.items():
            if attempt.side.is_working:
                working.setdefault(attempt.stream, []).append(handoff)
        for stream, handoffs in working.items():
            stream.send(HandoffProgress(tuple(handoffs)))

    def is_renewal_due(self) -> bool:
        """Whether the fabric agent must be destroyed to let go of blocks."""
        sides = [attempt.side for attempt in self._attempts.values()]
        return is_renewal_due(sides, self._clock.now(), self._quarantine_s)

    def posted(self) -> dict[HandoffId, int]:
        """Return, per attempt, how many writes the present agent was given at most."""
        return {handoff: a.side.num_posted for handoff, a in self._attempts.items()}

    def agent_destroyed(self, posted: dict[HandoffId, int]) -> None:
        """The agent that had the writes of `posted` is gone."""
        self._num_renewals += 1
        for handoff, before in posted.items():
            attempt = self._attempts.get(handoff)
            if attempt is not None:
                self._advance(attempt, p.AgentDestroyed(before))

    def stats(self) -> PrefillStats:
        """Return gauges and counters."""
        stages = Counter({stage.value: 0 for stage in prefill_side.Stage})
        stages.update(attempt.side.stage.value for attempt in self._attempts.values())
        del stages[prefill_side.Stage.OVER.value]
        return PrefillStats(
            attempts_by_stage=dict(stages),
            attempts_by_outcome=dict(self._outcomes),
            writes_pending=sum(len(a.side.pending) for a in self._attempts.values()),
            tombstones=len(self._tombstones),
            blocks_pushed=self._pusher.num_blocks,
            bytes_pushed=self._pusher.num_bytes,
            writes_failed=self._pusher.num_failed,
            agent_renewals=self._num_renewals,
        )

    # --- doing what the state machines say --------------------------------------------------

    def _advance(self, attempt: _Attempt, event: p.Event) -> None:
        attempt.side, effects = prefill_side.advance(attempt.side, event, self._clock.now())
        self._do_all(attempt, effects)

    def _do_all(self, attempt: _Attempt, effects: tuple[p.Effect, ...]) -> None:
        for effect in effects:
            self._do(attempt, effect)

    def _do(self, attempt: _Attempt, effect: p.Effect) -> None:
        engine_id = attempt.engine_id
        match effect:
            case p.Compute():
                self._compute(attempt, effect)
            case p.Push():
                on_end = partial(self._on_write_end, attempt, effect.number)
                self._pusher.push(attempt.side.ask, effect, on_end)
            case p.Tell():
                self._tell(attempt, effect)
            case p.StopComputing():
                self._engine.post(lambda engine: engine.abort(engine_id))
            case p.Release():
                self._engine.post(lambda engine: engine.release(engine_id))
            case p.Forget():
                self._forget(attempt, effect)
            case _:
                assert_never(effect)

    def _tell(self, attempt: _Attempt, effect: p.Tell) -> None:
        message = effect.message
        if isinstance(message, HandoffFailed) and message.is_fabric:
            self.paths.failed(attempt.side.ask.region.boot, message.message, self._clock.now())
        attempt.stream.send(message)

    def _compute(self, attempt: _Attempt, effect: p.Compute) -> None:
        request = replace(effect.request, request_id=attempt.engine_id)
        added = self._engine.call(lambda engine: engine.add(request, Mode.PREFILL))
        added.add_done_callback(
            lambda future: self._later(lambda attempts: attempts.added(attempt, future))
        )

    def added(self, attempt: _Attempt, future: asyncio.Future[None]) -> None:
        """The engine queued a prompt, or would not."""
        try:
            future.result()
        except RequestError as error:
            refused = p.EngineRefused(error.code or "overloaded", error.message)
            self._advance(attempt, refused)
        except ValueError as error:  # a peer's slip (a name twice, fields that disagree)
            extra = {"request_id": attempt.side.ask.handoff.request_id}
            _log.error("the engine does not take an ask: %s", error, extra=extra)
            self._advance(attempt, p.EngineRefused("invalid", str(error)))

    def _on_write_end(self, attempt: _Attempt, number: int, end: Poll) -> None:
        event = _write_event(number, end)
        self._later(lambda attempts: attempts._written(attempt, event))

    def _written(
        self, attempt: _Attempt, event: p.WriteDone | p.WriteFailed | p.WriteRefused
    ) -> None:
        if isinstance(event, p.WriteDone):
            self.paths.worked(attempt.side.ask.region.boot)
        self._advance(attempt, event)

    def _refused(self, stream: Stream[Any], effect: p.Effect) -> None:
        match effect:
            case p.Tell():
                stream.send(effect.message)
            case p.Forget():
                self._outcomes[effect.outcome] += 1
            case _:
                msg = f"a refusal has no effect {effect}"
                raise AssertionError(msg)

    def _forget(self, attempt: _Attempt, effect: p.Forget) -> None:
        del self._attempts[effect.handoff]
        del self._handoffs[attempt.engine_id]
        self._outcomes[effect.outcome] += 1
        if effect.may_land:
            self._tombstones.place(effect.handoff, self._clock.now(), may_land=True)
        if effect.outcome is p.AttemptOutcome.FAILED:
            extra = {"request_id": effect.handoff.request_id}
            _log.warning("handoff %s failed: a write did", effect.handoff, extra=extra)
        region = attempt.side.ask.region
        self._close_unless_in_use(region.worker_id, region.boot)
        self._rest_if_idle()

    def _rest_if_idle(self) -> None:
        if not self._attempts and not self._expected:
            self.busy.clear()


def _write_event(number: int, end: Poll) -> p.WriteDone | p.WriteFailed | p.WriteRefused:
    match end.state:
        case TransferState.DONE:
            return p.WriteDone(number)
        case TransferState.REFUSED:
            return p.WriteRefused(number, end.reason)
        case _:
            return p.WriteFailed(number, end.reason)
