"""One request's machine among workers that refuse, fail, freeze, die, repeat and skip.

The model: three workers, each with a first-in-first-out stream to the router; between streams any
order. A worker computes token `index` of a sample as `oracle(sample, index)` and goes on from the
outputs that a dispatch carries. Whatever happens:

- what the client gets is contiguous per sample and equals the oracle;
- nobody works on a dispatch that was given up without having been told to abort;
- the request ends, at the latest by its deadline, and the client hears of it once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import RequestError
from core.ids import RequestId, WorkerId
from core.request import EngineRequest, FinishReason, TokenUpdate
from core.sampling_params import SamplingParams
from router.dispatch.request_state import (
    Abort,
    Dispatch,
    Effect,
    End,
    Phase,
    RequestState,
    RetryRules,
)
from router.policy.decision import RefusalReason

REQUEST = RequestId("r")
LENGTHS = (7, 4)
DEADLINE = 100.0
WORKERS = [WorkerId("w0"), WorkerId("w1"), WorkerId("w2")]
workers = st.sampled_from(WORKERS)
samples = st.integers(0, len(LENGTHS) - 1)


def oracle(sample: int, index: int) -> int:
    return 1000 * sample + 7 * index


@dataclass
class Job:
    """A worker's work on one dispatch."""

    number: int
    done: list[int]
    running: list[bool] = field(default_factory=lambda: [True] * len(LENGTHS))


@dataclass
class Worker:
    """Jobs by dispatch number, and the messages on their way to the router."""

    jobs: dict[int, Job] = field(default_factory=dict)
    stream: deque[TokenUpdate] = field(default_factory=deque)
    is_up: bool = True


class Dispatching(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.dice = random.Random(0)
        self.workers = {name: Worker() for name in WORKERS}
        self.told: set[tuple[WorkerId, int]] = set()
        self.got: list[list[int]] = [[] for _ in LENGTHS]
        self.finished = [False for _ in LENGTHS]
        self.stopped_by_client = [False for _ in LENGTHS]
        self.ends: list[RequestError | None] = []
        sampling = SamplingParams(n=len(LENGTHS), max_tokens=max(LENGTHS))
        request = EngineRequest(REQUEST, (1, 2, 3), sampling)
        self.state = RequestState(request, deadline=DEADLINE, rules=RetryRules(max_lost=6))
        self.do(self.state.begin())

    # -- the router around the machine --

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case TokenUpdate():
                    self.client_gets(effect)
                case Dispatch():
                    self.place(effect)
                case Abort():
                    self.abort_arrives(effect)
                case End():
                    self.ends.append(effect.error)

    def client_gets(self, update: TokenUpdate) -> None:
        sample = update.sample_index
        assert not self.ends, "after the end"
        assert not self.finished[sample], "after the sample's end"
        assert not self.stopped_by_client[sample], "not wanted any more"
        assert update.start_index == len(self.got[sample]), "contiguous"
        self.got[sample].extend(update.token_ids)
        self.finished[sample] = update.finish_reason is not None

    def place(self, dispatch: Dispatch) -> None:
        assert dispatch.number == self.state.number
        choice = [w for w in WORKERS if self.workers[w].is_up and w not in dispatch.avoid]
        if not choice:
            any_up = any(worker.is_up for worker in self.workers.values())
            why = RefusalReason.AVOIDED if any_up else RefusalReason.NO_WORKER
            self.do(self.state.unplaced(why, self.now, self.dice))
            return
        chosen = choice[dispatch.number % len(choice)]
        outputs = dispatch.outputs or ((),) * len(LENGTHS)
        assert [list(tokens) for tokens in outputs] == self.got, "the tokens so far go along"
        job = Job(dispatch.number, [len(tokens) for tokens in outputs])
        self.workers[chosen].jobs[dispatch.number] = job
        self.do(self.state.sent(chosen, self.now, is_suspect=False))

    def abort_arrives(self, abort: Abort) -> None:
        worker = self.workers[abort.worker_id]
        if abort.sample_index is None:
            assert (abort.worker_id, abort.number) not in self.told, "told twice"
            self.told.add((abort.worker_id, abort.number))
            worker.jobs.pop(abort.number, None)
        elif abort.number in worker.jobs:
            worker.jobs[abort.number].running[abort.sample_index] = False

    # -- what may happen --

    @rule(sample=samples, count=st.integers(1, 3))
    def compute(self, sample: int, count: int) -> None:
        """Every worker makes tokens of whatever it still works on."""
        for worker in self.workers.values():
            for job in worker.jobs.values():
                start = job.done[sample]
                end = min(LENGTHS[sample], start + count)
                if job.running[sample]:
                    worker.stream.append(self.update(job, sample, start, end))
                    job.done[sample] = end
                    job.running[sample] = end < LENGTHS[sample]

    def update(self, job: Job, sample: int, start: int, end: int) -> TokenUpdate:
        return TokenUpdate(
            request_id=REQUEST,
            sample_index=sample,
            dispatch=job.number,
            start_index=start,
            token_ids=tuple(oracle(sample, index) for index in range(start, end)),
            finish_reason=FinishReason.LENGTH if end == LENGTHS[sample] else None,
        )

    @rule(order=st.permutations(WORKERS), count=st.integers(1, 4))
    def deliver(self, order: list[WorkerId], count: int) -> None:
        for name in order:
            stream = self.workers[name].stream
            for _ in range(min(count, len(stream))):
                self.take(stream.popleft())

    @rule(back=st.integers(0, 4), extra=st.integers(1, 2))
    def repeat(self, back: int, extra: int) -> None:
        """The current worker says tokens again, with some new ones."""
        job = self.current_job()
        if job is not None:
            for sample in range(len(LENGTHS)):
                known = len(self.got[sample])
                end = min(LENGTHS[sample], known + extra)
                if job.running[sample] and not self.workers_stream():
                    self.take(self.update(job, sample, max(0, known - back), end))
                    job.done[sample] = max(job.done[sample], end)
                    job.running[sample] = job.done[sample] < LENGTHS[sample]

    @rule(rarely=st.integers(0, 3))
    def lose_a_message(self, rarely: int) -> None:
        """What streams never do: a gap must be seen, never be skipped."""
        stream = self.workers_stream()
        if stream and rarely == 0:
            stream.popleft()

    @rule(sample=st.sampled_from([-1, 0, 1, 2]), reason=st.sampled_from(list(FinishReason)))
    def speak_nonsense(self, sample: int, reason: FinishReason) -> None:
        """A sample that is not there, an end before known tokens, an end that nobody asked for."""
        job = self.current_job()
        if job is not None and (not 0 <= sample < len(LENGTHS) or self.got[sample]):
            self.take(TokenUpdate(REQUEST, sample, job.number, 0, (), (), reason))

    def current_job(self) -> Job | None:
        if self.state.worker_id is None:
            return None
        return self.workers[self.state.worker_id].jobs.get(self.state.number)

    def workers_stream(self) -> deque[TokenUpdate]:
        if self.state.worker_id is None:
            return deque()
        return self.workers[self.state.worker_id].stream

    @rule(name=workers, sample=samples, start=st.integers(0, 8), count=st.integers(0, 3))
    def thawed_twin_speaks(self, name: WorkerId, sample: int, start: int, count: int) -> None:
        """A worker that was given up says again, or late, what it computed of its dispatch."""
        for number in range(1, self.state.number):
            end = min(LENGTHS[sample], start + count)
            if (name, number) in self.told:
                self.take(self.update(Job(number, []), sample, min(start, end), end))

    def take(self, update: TokenUpdate) -> None:
        self.do(self.state.updated(update, self.now))

    @rule(reason=st.sampled_from(["overloaded", "wrong_role", "draining", "no_prefill_worker"]))
    def refuse(self, reason: str) -> None:
        """A refusal comes ahead of any token, so only where there was none of this dispatch."""
        if self.state.phase is Phase.DISPATCHED and self.state.worker_id is not None:
            self.end_job()
            self.do(self.state.refused(self.state.number, reason, "", self.now))

    @rule(rarely=st.integers(0, 9))
    def fail(self, rarely: int) -> None:
        if self.state.worker_id is not None:
            self.end_job()
            number, retriable = self.state.number, rarely > 0
            self.do(self.state.failed(number, "x", self.now, retriable=retriable))

    def end_job(self) -> None:
        assert self.state.worker_id is not None
        worker = self.workers[self.state.worker_id]
        worker.jobs.pop(self.state.number, None)
        worker.stream.clear()  # what was sent before came before

    @rule(name=workers)
    def die(self, name: WorkerId) -> None:
        self.workers[name] = Worker(is_up=False)
        self.do(self.state.stream_lost(name, "killed", self.now))

    @rule(name=workers)
    def come_up(self, name: WorkerId) -> None:
        if not self.workers[name].is_up:
            self.workers[name].is_up = True
            self.do(self.state.worker_came_up())

    @rule(name=workers, suspect=st.booleans())
    def heartbeats(self, name: WorkerId, suspect: bool) -> None:
        self.state.suspect(name, self.now, suspect=suspect)

    @rule(name=workers)
    def forget(self, name: WorkerId) -> None:
        self.do(self.state.disowned(name, self.now))

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.run_timer()

    def run_timer(self) -> None:
        for _ in range(100):
            if self.state.phase is Phase.ENDED or self.state.due() > self.now:
                return
            self.do(self.state.tick(self.now))
        pytest.fail("a timer that is due for ever")

    @precondition(lambda self: not self.ends)
    @rule(sample=samples, rarely=st.integers(0, 4))
    def client_stops_a_sample(self, sample: int, rarely: int) -> None:
        if rarely:
            return
        if not self.finished[sample]:
            self.stopped_by_client[sample] = True
        self.do(self.state.finish_sample(sample))

    @rule(rarely=st.integers(0, 29))
    def client_leaves(self, rarely: int) -> None:
        if rarely == 0:
            self.do(self.state.abort())

    # -- what always holds --

    @invariant()
    def tokens_are_the_oracles(self) -> None:
        for sample, tokens in enumerate(self.got):
            assert tokens == [oracle(sample, index) for index in range(len(tokens))]
            assert not self.finished[sample] or len(tokens) == LENGTHS[sample]

    @invariant()
    def only_the_current_dispatch_is_worked_on(self) -> None:
        for name, worker in self.workers.items():
            for number, job in worker.jobs.items():
                is_current = name == self.state.worker_id and number == self.state.number
                assert is_current or not any(job.running)

    @invariant()
    def it_ends_once(self) -> None:
        assert len(self.ends) == (self.state.phase is Phase.ENDED)

    @invariant()
    def every_state_has_a_deadline(self) -> None:
        assert self.state.due() <= DEADLINE
        waits = self.state.phase is Phase.WAITING
        assert not waits or self.state.due() <= self.now + 2.0

    def teardown(self) -> None:
        """Whatever state it was left in, time alone ends it."""
        while self.state.phase is not Phase.ENDED:
            assert self.now <= DEADLINE
            self.now = max(self.now, self.state.due())
            self.run_timer()
        assert len(self.ends) == 1
        if all(self.finished):
            assert self.ends == [None]


Dispatching.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRequestState = Dispatching.TestCase
