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

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import RequestError
from core.ids import RequestId, WorkerId
from core.request import EngineRequest, FinishReason, PromptLogprobs, TokenUpdate
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
LENGTHS = (40, 25)
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
        self.moved_from: WorkerId | None = None
        sampling = SamplingParams(n=len(LENGTHS), max_tokens=max(LENGTHS))
        request = EngineRequest(REQUEST, (1, 2, 3), sampling)
        self.state = RequestState(request, deadline=DEADLINE, rules=RetryRules(max_lost=9))
        self.do(self.state.begin())

    # -- the router around the machine --

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case TokenUpdate():
                    self.client_gets(effect)
                case PromptLogprobs():
                    pytest.fail("nobody asked for the scores of the prompt")
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
        assert dispatch.source == self.moved_from, "who has its KV is asked, and nobody else"
        self.moved_from = None
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

    # -- what may happen; half of the rules make progress, so that trouble meets every state --

    @rule(sample=samples, count=st.integers(1, 3))
    def compute(self, sample: int, count: int) -> None:
        """Every worker makes tokens of whatever it still works on."""
        for worker in self.workers.values():
            for job in worker.jobs.values():
                start = job.done[sample]
                end = min(LENGTHS[sample], start + count)
                if job.running[sample]:
                    worker.stream.append(self.update(job.number, sample, start, end))
                    job.done[sample] = end
                    job.running[sample] = end < LENGTHS[sample]

    def update(self, number: int, sample: int, start: int, end: int) -> TokenUpdate:
        return TokenUpdate(
            request_id=REQUEST,
            sample_index=sample,
            dispatch=number,
            start_index=start,
            token_ids=tuple(oracle(sample, index) for index in range(start, end)),
            finish_reason=FinishReason.LENGTH if end == LENGTHS[sample] else None,
        )

    @rule(order=st.permutations(WORKERS), count=st.integers(1, 3))
    def deliver(self, order: list[WorkerId], count: int) -> None:
        for name in order:
            stream = self.workers[name].stream
            for _ in range(min(count, len(stream))):
                self.take(stream.popleft())

    def take(self, update: TokenUpdate) -> None:
        self.do(self.state.updated(update, self.now))

    @rule(sample=samples, count=st.integers(1, 3))
    def compute_and_deliver(self, sample: int, count: int) -> None:
        self.compute(sample, count)
        self.deliver(WORKERS, 9)

    @rule(
        kind=st.sampled_from(["repeat", "lose", "nonsense", "twin"]),
        sample=samples,
        back=st.integers(0, 9),
        count=st.integers(0, 3),
    )
    def messages_go_wrong(self, kind: str, sample: int, back: int, count: int) -> None:
        start = max(0, len(self.got[sample]) - back)
        end = min(LENGTHS[sample], start + count)
        number, name = self.state.number, self.state.worker_id
        if kind == "twin":  # says on, or late, its own tokens of a dispatch that was given up
            for stale in range(1, number + (name is None)):
                late = self.update(stale, sample, start, end)
                self.take(msgspec.structs.replace(late, token_ids=(-1,) * len(late.token_ids)))
        elif name is None:
            return
        elif kind == "repeat" and end <= len(self.got[sample]):
            self.take(self.update(number, sample, start, end))
        elif kind == "lose" and self.workers[name].stream:  # a gap must be seen, never skipped
            self.workers[name].stream.popleft()
        elif kind == "nonsense":
            reason = [FinishReason.STOP, FinishReason.ERROR, FinishReason.ABORT][back % 3]
            nobodys = sample if back < 5 else len(LENGTHS)
            if nobodys != sample or len(self.got[sample]) > 0:
                self.take(TokenUpdate(REQUEST, nobodys, number, 0, (), (), reason))

    @rule(
        kind=st.sampled_from(
            ["die", "up", "suspect", "recover", "disown", "refuse", "fail", "move"]
        ),
        name=workers,
        reason=st.sampled_from(["overloaded", "wrong_role", "draining", "no_prefill_worker"]),
        count=st.integers(0, 9),
    )
    def workers_go_wrong(self, kind: str, name: WorkerId, reason: str, count: int) -> None:
        number, is_current = self.state.number, name == self.state.worker_id
        if kind == "die":
            self.workers[name] = Worker(is_up=False)
            self.do(self.state.stream_lost(name, "killed", self.now))
        elif kind == "up" and not self.workers[name].is_up:
            self.workers[name].is_up = True
            self.do(self.state.worker_came_up())
        elif kind in ("suspect", "recover"):
            self.state.suspect(name, self.now, suspect=kind == "suspect")
        elif kind == "disown":
            self.do(self.state.disowned(name, self.now))
        elif kind == "refuse" and is_current and self.state.phase is Phase.DISPATCHED:
            self.end_job(name)  # a refusal comes ahead of any token
            self.do(self.state.refused(number, reason, "", self.now))
        elif kind == "fail" and is_current:
            self.end_job(name)
            self.do(self.state.failed(number, "x", self.now, retriable=count > 0))
        elif kind == "move" and is_current:
            self.deliver([name], 999)
            if name == self.state.worker_id and number == self.state.number:
                self.end_job(name)  # its last word
                self.moved_from = name if count > 0 else None
                self.do(self.state.moved(number, self.now, has_kv=count > 0))

    def end_job(self, name: WorkerId) -> None:
        self.workers[name].jobs.pop(self.state.number, None)
        self.workers[name].stream.clear()

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
    @rule(sample=samples, kind=st.integers(0, 29))
    def client_has_enough(self, sample: int, kind: int) -> None:
        if kind == 0:
            self.do(self.state.abort())
        elif kind < 4 and not self.finished[sample]:
            self.stopped_by_client[sample] = True
            self.do(self.state.finish_sample(sample))

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


Dispatching.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestRequestState = Dispatching.TestCase
