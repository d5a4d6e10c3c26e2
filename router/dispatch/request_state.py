"""The life of one request at the router, without I/O: what happened goes in, effects come out.

              +--------------------- back-off over, or a worker came up -----------+
              v                                                                    |
    begin -> WAITING --Dispatch, sent()--> DISPATCHED --first token--> STREAMING   |
              |  ^                            |  |                      |   |      |
              |  +---- refused, failed, moved, lost, suspect, silent, gap --+------+
              |                               |                         |
              +-> ENDED <- deadline, abort, every sample finished <-----+

    state       owner                deadline
    WAITING     the router's timers  retry time, patience, the request's deadline
    DISPATCHED  the decode worker    grace of a suspect worker, the request's deadline
    STREAMING   the decode worker    the same

Every dispatch has the next number, and a message counts only with the current number and the next
index: what a worker says that was given up (a thawed twin) changes nothing, and it is told to
abort. A new dispatch carries the tokens so far, which are forced, so that the stream goes on where
it stopped.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

import msgspec

from core.back_off import BackOff, Dice
from core.errors import RequestError
from core.ids import WorkerId
from core.request import EngineRequest, FinishReason, PromptLogprobs, TokenUpdate
from router.dispatch.failure import Trouble, error_of
from router.policy.decision import RefusalReason


class Phase(enum.StrEnum):
    """Where a request stands; label of the gauge."""

    WAITING = "waiting"
    DISPATCHED = "dispatched"
    STREAMING = "streaming"
    ENDED = "ended"


_STREAMING = Phase.STREAMING
_FAILURES = (FinishReason.ABORT, FinishReason.ERROR)
"""Looked up once: a class's members are slow to find, and these are needed with every token."""


class RetryRules(msgspec.Struct, frozen=True):
    """How long trouble is borne; seconds.

    Attributes:
        first_wait_s, max_wait_s: back-off after every worker that could serve was tried; doubled
            each time, and shortened by up to half at random.
        fresh_patience_s: for a worker to come up, of a request that none has had yet: its stream
            may be about to open. Short, so that a client soon hears that the cluster is down.
        refused_patience_s: from the first refusal until the client gets 429; of a request that a
            worker had begun with, as long as after a loss.
        lost_patience_s: from the first loss until the client gets 503; long enough for a worker
            to be started again.
        suspect_grace_s: without heartbeats beyond `suspect_s` until the request goes elsewhere.
        silence_s: how long a worker may say that it has no request at all until its requests are
            taken as lost.
        max_lost: workers that may be lost under one request; it may be what kills them.
    """

    first_wait_s: float = 0.05
    max_wait_s: float = 2.0
    fresh_patience_s: float = 2.0
    refused_patience_s: float = 1.0
    lost_patience_s: float = 15.0
    suspect_grace_s: float = 2.0
    silence_s: float = 5.0
    max_lost: int = 3


class Dispatch(msgspec.Struct, frozen=True):
    """Choose a worker and send it this; answer with `sent` or `unplaced`.

    Attributes:
        outputs: tokens so far, one tuple a sample; empty before any.
        avoid: workers not to choose.
        source: who stopped it to have it moved, and has its KV; None where nobody has.
    """

    number: int
    outputs: tuple[tuple[int, ...], ...]
    avoid: frozenset[WorkerId]
    source: WorkerId | None = None


class Abort(msgspec.Struct, frozen=True):
    """Tell a worker to end a dispatch, or one sample of it."""

    worker_id: WorkerId
    number: int
    sample_index: int | None = None


class End(msgspec.Struct, frozen=True):
    """Nothing more will come; `error` is what the client gets."""

    error: RequestError | None = None


Effect = TokenUpdate | PromptLogprobs | Dispatch | Abort | End
"""A `TokenUpdate`, or `PromptLogprobs`, is to be handed to the client as it is."""


class RequestState:
    """One request's machine. Every input may come at any time; after the end all are ignored.

    Args:
        request: its `outputs`, if any, are the tokens so far.
        deadline: when it must have ended.
        rules: how long trouble is borne.
    """

    def __init__(
        self,
        request: EngineRequest,
        *,
        deadline: float,
        rules: RetryRules | None = None,
    ) -> None:
        self.phase = Phase.WAITING
        self.number = 0
        self.worker_id: WorkerId | None = None
        self.progress_at = 0.0
        self._rules = rules or RetryRules()
        self._deadline = deadline
        num_samples = request.sampling.n
        # 4 bytes a token: a client that does not read holds them for long.
        self._outputs = [array("I", tokens) for tokens in request.outputs or [()] * num_samples]
        self._finished = [False] * num_samples
        self._next_scored = 1
        self._scores_end = len(request.prompt) if request.wants_prompt_logprobs else 0
        self._worker_by_number: dict[int, WorkerId] = {}
        self._told: set[int] = set()
        self._avoid: set[WorkerId] = set()
        self._source: WorkerId | None = None
        self._trouble: Trouble | None = None
        self._trouble_since = 0.0
        self._back_off = BackOff(first_s=self._rules.first_wait_s, limit_s=self._rules.max_wait_s)
        self._num_lost = 0
        self._has_lost_a_start = False
        self._retry_at: float | None = None
        self._suspect_at: float | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the longest sample so far."""
        return max(map(len, self._outputs))

    @property
    def has_lost_a_start(self) -> bool:
        """Whether a worker that may have begun with it was given up."""
        return self._has_lost_a_start

    @property
    def num_dispatches(self) -> int:
        """How often it was sent to a worker; numbers also count the tries that found none."""
        return len(self._worker_by_number)

    def due(self) -> float:
        """Return when `tick` is needed next."""
        due = self._deadline
        if self._retry_at is not None:
            due = min(due, self._retry_at)
        if self._suspect_at is not None:
            due = min(due, self._suspect_at + self._rules.suspect_grace_s)
        return due

    # -- placing ---------------------------------------------------------------------------------

    def begin(self) -> Sequence[Effect]:
        """Ask for the first worker."""
        return self._dispatch()

    def sent(self, worker_id: WorkerId, now: float, *, is_suspect: bool) -> Sequence[Effect]:
        """The dispatch asked for last is on its way to `worker_id`."""
        self.worker_id = worker_id
        self._worker_by_number[self.number] = worker_id
        self._source = None
        self.phase = Phase.DISPATCHED
        self.progress_at = now
        self._suspect_at = now if is_suspect else None
        return [
            Abort(worker_id, self.number, index)
            for index, finished in enumerate(self._finished)
            if finished
        ]

    def unplaced(self, refusal: RefusalReason, now: float, dice: Dice) -> Sequence[Effect]:
        """No worker could be chosen: wait, then try all again."""
        if refusal is RefusalReason.TOO_LONG:
            return self._end(error_of(Trouble.TOO_LONG, ""))
        if refusal is not RefusalReason.AVOIDED:
            missing_prefill = refusal is RefusalReason.NO_PREFILL_WORKER
            self._note(Trouble.NO_PREFILL if missing_prefill else Trouble.NO_WORKER, now)
        if self._is_out_of_patience(now):
            return self._give_up("")
        self._retry_at = min(now + self._back_off.next_s(dice), self._patience_ends())
        self._avoid.clear()
        return ()

    def worker_came_up(self) -> Sequence[Effect]:
        """A worker is there that was not: who waits need not wait longer."""
        return self._dispatch() if self._retry_at is not None else ()

    # -- what workers say ------------------------------------------------------------------------

    def updated(self, update: TokenUpdate, now: float) -> Sequence[Effect]:
        """Take new tokens of one sample."""
        if update.dispatch != self.number or self.worker_id is None:
            return self.stale(update.dispatch)
        if not 0 <= update.sample_index < len(self._finished):
            return self._broken(f"a token of sample {update.sample_index}", now)
        if self._finished[update.sample_index]:
            return ()
        known = len(self._outputs[update.sample_index])
        end = update.start_index + len(update.token_ids)
        if self._next_scored < self._scores_end:
            return self._broken("a token ahead of the prompt's log-probabilities", now)
        if update.start_index > known or (update.finish_reason and end < known):
            span = f"tokens {update.start_index} to {end}"
            return self._broken(f"{span} of sample {update.sample_index} after {known}", now)
        if update.finish_reason in _FAILURES:
            return self._broken(f"finish reason {update.finish_reason}", now)
        if update.start_index < known:
            update = _without_known(update, known)
        if not update.token_ids and update.finish_reason is None:
            return ()
        return self._accept(update, now)

    def _accept(self, update: TokenUpdate, now: float) -> Sequence[Effect]:
        self._outputs[update.sample_index].extend(update.token_ids)
        self.phase = _STREAMING
        self.progress_at = now
        if self._trouble is not None:
            self._trouble = None
            self._back_off.reset()
            self._avoid.clear()
        if update.finish_reason is None:
            return (update,)
        self._finished[update.sample_index] = True
        if not all(self._finished):
            return (update,)
        return (update, *self._end(None, tell=False))

    def scored(self, number: int, logprobs: PromptLogprobs, now: float) -> Sequence[Effect]:
        """Take log-probabilities of prompt tokens; a later dispatch tells all of them again."""
        if number != self.number or self.worker_id is None:
            return self.stale(number)
        news = logprobs.since(self._next_scored)
        if news is None:
            return ()
        if news.start > self._next_scored:
            return self._broken(f"prompt token {news.start} after {self._next_scored - 1}", now)
        self._next_scored = news.end
        self.progress_at = now
        return (news,)

    def stale(self, number: int) -> Sequence[Effect]:
        """A message of a dispatch that was given up: tell that worker once to abort."""
        worker_id = self._worker_by_number.get(number)
        if worker_id is None or self.phase is Phase.ENDED or number in self._told:
            return ()
        self._told.add(number)
        return (Abort(worker_id, number),)

    def refused(self, number: int, reason: str, message: str, now: float) -> Sequence[Effect]:
        """The worker did not start it."""
        if number != self.number or self.worker_id is None:
            return ()
        self._told.add(number)  # it holds nothing
        final = {"too_long": Trouble.TOO_LONG, "invalid": Trouble.INVALID}.get(reason)
        if final is not None:
            return self._end(error_of(final, message), tell=False)
        trouble = {"overloaded": Trouble.REFUSED, "no_prefill_worker": Trouble.NO_PREFILL}
        kind = trouble.get(reason, Trouble.LOST)
        return self._elsewhere(kind, message or reason, now, has_started=False)

    def failed(self, number: int, message: str, now: float, *, retriable: bool) -> Sequence[Effect]:
        """The worker ended it without finishing."""
        if number != self.number or self.worker_id is None:
            return ()
        self._told.add(number)
        if not retriable:  # its time is over there no earlier than here
            trouble = Trouble.TIMEOUT if now >= self._deadline else Trouble.FAILED
            return self._end(error_of(trouble, message), tell=False)
        return self._elsewhere(Trouble.LOST, message, now)

    def moved(self, number: int, now: float, *, has_kv: bool) -> Sequence[Effect]:
        """The worker stopped it as asked; another goes on, and may ask for what is there."""
        if number != self.number or self.worker_id is None:
            return ()
        self._told.add(number)
        self._source = self.worker_id if has_kv else None
        self._trouble = None  # it was served: patience begins anew
        return self._elsewhere(Trouble.LOST, f"worker {self.worker_id} drains", now)

    # -- what happens to workers -----------------------------------------------------------------

    def stream_lost(self, worker_id: WorkerId, reason: str, now: float) -> Sequence[Effect]:
        """The stream closed: the worker aborts what came over it, so nobody need tell it."""
        if worker_id != self.worker_id:
            return ()
        self._told.add(self.number)
        self._num_lost += 1
        message = f"worker {worker_id} was lost ({reason})"
        if self._num_lost >= self._rules.max_lost:
            return self._end(error_of(Trouble.LOST, message))
        return self._elsewhere(Trouble.LOST, message, now)

    def suspect(self, worker_id: WorkerId, now: float, *, suspect: bool) -> None:
        """Heartbeats of the worker stopped, or came back."""
        if worker_id == self.worker_id:
            self._suspect_at = now if suspect else None

    def disowned(self, worker_id: WorkerId, now: float) -> Sequence[Effect]:
        """The worker keeps saying that it has no request at all."""
        if worker_id != self.worker_id or now - self.progress_at < self._rules.silence_s:
            return ()
        return self._broken("it says that it has no such request", now)

    # -- time and the client ---------------------------------------------------------------------

    def tick(self, now: float) -> Sequence[Effect]:
        """Do what is due."""
        if self.phase is Phase.ENDED:
            return ()
        if now >= self._deadline:
            return self._end(error_of(Trouble.TIMEOUT, ""))
        if self._retry_at is not None and now >= self._retry_at:
            return self._dispatch()
        grace_s = self._rules.suspect_grace_s
        if self._suspect_at is not None and now >= self._suspect_at + grace_s:
            return self._broken("its heartbeats are missing", now)
        return ()

    def abort(self, error: RequestError | None = None) -> Sequence[Effect]:
        """The client is gone, or the router stops: `error` is what the client gets."""
        return () if self.phase is Phase.ENDED else self._end(error)

    def finish_sample(self, sample_index: int) -> Sequence[Effect]:
        """The client needs no more of this sample."""
        if self.phase is Phase.ENDED or self._finished[sample_index]:
            return ()
        self._finished[sample_index] = True
        told: tuple[Effect, ...] = ()
        if self.worker_id is not None:  # of the last one, too: KV on its way may arrive, for others
            told = (Abort(self.worker_id, self.number, sample_index),)
        return (*told, *self._end(None, tell=False)) if all(self._finished) else told

    def unfinished(self) -> list[tuple[int, int]]:
        """Return (sample index, number of its tokens) of every sample that still runs."""
        return [
            (index, len(self._outputs[index]))
            for index, finished in enumerate(self._finished)
            if not finished
        ]

    # -- steps -----------------------------------------------------------------------------------

    def _dispatch(self) -> Sequence[Effect]:
        self.number += 1
        self._retry_at = None
        any_tokens = any(self._outputs)
        outputs = tuple(tuple(tokens) for tokens in self._outputs) if any_tokens else ()
        return (Dispatch(self.number, outputs, frozenset(self._avoid), self._source),)

    def _broken(self, what: str, now: float) -> Sequence[Effect]:
        """Give the worker up and tell it so."""
        told = self.stale(self.number)
        message = f"worker {self.worker_id}: {what}"
        return (*told, *self._elsewhere(Trouble.LOST, message, now))

    def _elsewhere(
        self, trouble: Trouble, message: str, now: float, *, has_started: bool = True
    ) -> Sequence[Effect]:
        assert self.worker_id is not None
        self._avoid.add(self.worker_id)
        self._has_lost_a_start |= has_started
        if now - self.progress_at > self._rules.lost_patience_s:
            self._trouble = None  # it was served, or queued, since the last trouble
        self.worker_id = None
        self._suspect_at = None
        self.phase = Phase.WAITING
        self._note(trouble, now)
        if self._is_out_of_patience(now):
            return self._give_up(message)
        return self._dispatch()

    def _note(self, trouble: Trouble, now: float) -> None:
        if self._trouble is None:
            self._trouble_since = now
        self._trouble = trouble

    def _patience_ends(self) -> float:
        rules = self._rules
        patience_s = rules.lost_patience_s
        if self._trouble is Trouble.REFUSED and not self._has_lost_a_start:
            patience_s = rules.refused_patience_s
        elif not self._worker_by_number:
            patience_s = rules.fresh_patience_s
        return min(self._deadline, self._trouble_since + patience_s)

    def _is_out_of_patience(self, now: float) -> bool:
        return now >= self._patience_ends()

    def _give_up(self, message: str) -> Sequence[Effect]:
        assert self._trouble is not None
        return self._end(error_of(self._trouble, message))

    def _end(self, error: RequestError | None, *, tell: bool = True) -> Sequence[Effect]:
        told = self.stale(self.number) if tell and self.worker_id is not None else ()
        self.phase = Phase.ENDED
        self.worker_id = None
        self._retry_at = None
        self._suspect_at = None
        return (*told, End(error))


def _without_known(update: TokenUpdate, known: int) -> TokenUpdate:
    """Cut off what was taken already."""
    skip = known - update.start_index
    return TokenUpdate(
        request_id=update.request_id,
        sample_index=update.sample_index,
        dispatch=update.dispatch,
        start_index=known,
        token_ids=update.token_ids[skip:],
        logprobs=update.logprobs[skip:],
        finish_reason=update.finish_reason,
    )
