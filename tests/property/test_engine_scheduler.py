"""The scheduler on the mock executor, driven in random order: every token equals the oracle, the
invariants hold after every call, and in the end every block is free or cached."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.errors import RequestError
from core.ids import Attempt, BlockId, HandoffId, RequestId
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from engine.events import Admitted, Computed, Event, Mode, Reserved, Scored
from engine.executor.mock_tokens import expected_tokens
from engine.memory.block_pool import BlockState
from engine.token_rules import end_of
from tests.prompt_scores import expected_scores, joined
from tests.replica import EOS, VOCAB, OracleDrafter, Replica

PROMPT = st.builds(
    lambda shared, own, salt: [*range(10, 10 + shared), *range(salt, salt + own)],
    st.integers(0, 40),
    st.integers(1, 40),
    st.integers(100, 900),
)


class EngineMachine(RuleBasedStateMachine):
    """One tiny replica, its pool, its peers and its clients."""

    @initialize(
        seed=st.integers(0, 1000),
        max_inflight=st.sampled_from([1, 2, 4]),
        num_blocks=st.sampled_from([12, 24, 60]),
        speculates=st.booleans(),
        max_slots=st.sampled_from([2, 5, 64]),
    )
    def start(
        self, seed: int, max_inflight: int, num_blocks: int, speculates: bool, max_slots: int
    ) -> None:
        rng = random.Random(seed)
        self.replica = Replica(
            num_blocks=num_blocks,
            block_size=8,
            max_inflight=max_inflight,
            chunk_tokens=24,
            max_slots=max_slots,
            max_waiting=20,
            accept=(lambda most: rng.randint(0, most)) if speculates else None,
            drafter=OracleDrafter(rng) if speculates else None,
        )
        self.engine = self.replica.engine
        self.num_added = 0
        self.aborted: set[tuple[RequestId, int]] = set()
        self.reserved: dict[HandoffId, Reserved] = {}
        self.handoffs: dict[HandoffId, EngineRequest] = {}
        self.quarantined: set[HandoffId] = set()
        self.sources: dict[RequestId, tuple[BlockId, ...]] = {}
        self.tables: dict[RequestId, tuple[BlockId, ...]] = {}
        self.prefills: dict[RequestId, EngineRequest] = {}
        self.requests: dict[RequestId, EngineRequest] = {}
        self.locals: dict[RequestId, EngineRequest] = {}
        self.scored: set[RequestId] = set()

    def _request(
        self, prompt: list[int], n: int, max_tokens: int, priority: int, forced: int = 0
    ) -> EngineRequest:
        self.num_added += 1
        sampling = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            seed=self.num_added,
            eos_token_ids=(EOS,),
            temperature=float(self.num_added % 2),
            prompt_logprobs=1 if self.num_added % 3 == 0 else None,
        )
        request = EngineRequest(
            RequestId(f"r{self.num_added}"), tuple(prompt), sampling, priority=priority
        )
        if not forced:
            return request
        return self._with_outputs(request, [forced] * n)

    def _with_outputs(self, request: EngineRequest, lengths: list[int]) -> EngineRequest:
        outputs = tuple(
            expected_tokens(request.prompt, request.sampling, vocab_size=VOCAB, sample_index=index)[
                :length
            ]
            for index, length in enumerate(lengths)
        )
        return EngineRequest(
            request.request_id,
            request.prompt,
            request.sampling,
            outputs=outputs,
            priority=request.priority,
        )

    def _add(self, request: EngineRequest, mode: Mode, handoff: HandoffId | None = None) -> bool:
        try:
            self.engine.add(request, mode, handoff=handoff)
        except RequestError:
            return False
        self.replica.requests[request.request_id] = request
        if request.wants_prompt_logprobs and mode is Mode.LOCAL and len(request.prompt) > 1:
            self.scored.add(request.request_id)
        return True

    @rule(
        prompt=PROMPT,
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 1),
        forced=st.sampled_from([0, 0, 0, 1, 12]),
    )
    def add_local(
        self, prompt: list[int], n: int, max_tokens: int, priority: int, forced: int
    ) -> None:
        request = self._request(prompt, n, max_tokens, priority, forced)
        if self._add(request, Mode.LOCAL):
            self.locals[request.request_id] = request

    @precondition(lambda self: self.locals)
    @rule(data=st.data())
    def dispatch_again(self, data: st.DataObject) -> None:
        """As after a decode worker's death: known outputs are forced, some of them cached here."""
        before = self.locals[data.draw(st.sampled_from(sorted(self.locals)))]
        n = before.sampling.n
        lengths = data.draw(st.lists(st.integers(0, 30), min_size=n, max_size=n))
        self.num_added += 1
        again = EngineRequest(RequestId(f"r{self.num_added}"), before.prompt, before.sampling)
        request = self._with_outputs(again, lengths)
        if self._add(request, Mode.LOCAL):
            self.locals[request.request_id] = request

    @rule(prompt=PROMPT, n=st.integers(1, 3))
    def add_prefill(self, prompt: list[int], n: int) -> None:
        request = self._request(prompt, n, 20, 0)
        if self._add(request, Mode.PREFILL):
            self.prefills[request.request_id] = request
            self.requests[request.request_id] = request
            del self.replica.requests[request.request_id]

    @rule(prompt=PROMPT, n=st.integers(1, 3), max_tokens=st.integers(2, 20))
    def add_receive(self, prompt: list[int], n: int, max_tokens: int) -> None:
        request = self._request(prompt, n, max_tokens, 0)
        handoff = HandoffId(request.request_id, Attempt(1, 1))
        if self._add(request, Mode.RECEIVE, handoff):
            self.handoffs[handoff] = request

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._note(self.replica.step())

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Reserved):
                self.reserved[event.handoff] = event
            elif isinstance(event, Admitted):
                self._note_admitted(event)
            elif isinstance(event, Computed):
                request = self.requests[event.request_id]
                blocks = self.tables[event.request_id]
                assert self.replica.holds_kv(request.prompt, blocks, event.num_computed)

    def _note_admitted(self, event: Admitted) -> None:
        if event.request_id in self.requests:
            assert event.mode is Mode.PREFILL
            self.sources[event.request_id] = event.block_ids
            self.tables[event.request_id] = event.block_ids
            return
        assert event.mode is Mode.LOCAL
        for handoff in [h for h in self.handoffs if h.request_id == event.request_id]:
            self.locals[event.request_id] = self.handoffs.pop(handoff)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def kv_arrives(self, data: st.DataObject) -> None:
        handoff = data.draw(st.sampled_from(sorted(self.reserved)))
        self._arrive(handoff)

    def _arrive(self, handoff: HandoffId) -> None:
        event = self.reserved.pop(handoff)
        request = self.handoffs.pop(handoff)
        self.replica.write_kv(request.carried, event.block_ids, event.num_cached_blocks)
        first = [
            expected_tokens(request.prompt, request.sampling, vocab_size=VOCAB, sample_index=i)[0]
            for i in range(request.sampling.n)
        ]
        num_received = max(0, len(request.prompt) - 8 * event.num_cached_blocks)
        forced = bool(request.outputs)
        self.engine.kv_arrived(handoff, [] if forced else first, num_received=num_received)
        outputs = request.outputs or tuple((token,) for token in first)
        self.locals[request.request_id] = request
        self.replica.requests[request.request_id] = EngineRequest(
            request.request_id, request.prompt, request.sampling, outputs=outputs
        )

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data(), locally=st.booleans(), forced=st.booleans())
    def abandon(self, data: st.DataObject, locally: bool, forced: bool) -> None:
        handoff = data.draw(st.sampled_from(sorted(self.handoffs)))
        request = self.handoffs.pop(handoff)
        if forced and not request.outputs:
            n = request.sampling.n
            request = self._with_outputs(
                request, data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
            )
        self.replica.requests[request.request_id] = request
        if self.reserved.pop(handoff, None):
            self.quarantined.add(handoff)
        if locally:
            self.engine.compute_locally(handoff, request)
            self.locals[request.request_id] = request
        else:
            successor = HandoffId(handoff.request_id, handoff.attempt.next_trial())
            self.engine.retry(handoff, successor, request)
            if successor in self.replica.scheduler._state.handoffs:
                self.handoffs[successor] = request
            else:  # every sample is over: ended by its outputs, or aborted
                assert all(
                    (request.request_id, i) in self.aborted
                    or end_of(outputs, request.sampling) is not None
                    for i, outputs in enumerate(request.outputs)
                )

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data(), quarantine=st.booleans())
    def end_reservation(self, data: st.DataObject, quarantine: bool) -> None:
        handoff = data.draw(st.sampled_from(sorted(self.handoffs)))
        request = self.handoffs.pop(handoff)
        self.engine.end_reservation(handoff, quarantine=quarantine)
        if self.reserved.pop(handoff, None) and quarantine:
            self.quarantined.add(handoff)
        self.aborted |= {(request.request_id, i) for i in range(request.sampling.n)}

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self._write_late()
        handoff = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.quarantined.discard(handoff)
        assert self.engine.end_quarantine(handoff) > 0
        assert self.engine.end_quarantine(handoff) == 0

    def _write_late(self) -> None:
        for block_id in range(self.replica.pool.num_blocks):
            if self.replica.pool.state(BlockId(block_id)) is BlockState.QUARANTINED:
                self.replica.fill(BlockId(block_id), 0xAB)

    @precondition(lambda self: self.prefills)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.prefills)))
        del self.prefills[request_id]
        self.sources.pop(request_id, None)
        self.engine.release(request_id)
        self.engine.release(request_id)

    @precondition(lambda self: self.prefills)
    @rule(data=st.data())
    def abort_prefill(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.prefills))))

    @precondition(lambda self: self.locals)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.locals)))
        n = self.locals[request_id].sampling.n
        sample_index = None if whole else data.draw(st.integers(0, n - 1))
        self.engine.abort(request_id, sample_index)
        self.aborted |= {
            (request_id, i) for i in (range(n) if sample_index is None else [sample_index])
        }

    @rule()
    def fence(self) -> None:
        assume(not self.engine._in_flight)
        self.replica.region.fence()

    @invariant()
    def holds(self) -> None:
        self.engine.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "replica"):
            return
        for _ in range(5000):
            for handoff in list(self.reserved):
                self._arrive(handoff)
            while self.sources:
                self.engine.release(self.sources.popitem()[0])
            while self.quarantined:
                self.engine.end_quarantine(self.quarantined.pop())
            if not self.engine.has_work():
                break
            self._note(self.replica.step())
        self._check_outputs()
        self._check_scores()
        self.replica.assert_idle()
        self.replica.executor.close()

    def _check_outputs(self) -> None:
        for request_id, request in self.replica.requests.items():
            for index in range(request.sampling.n):
                told = self.replica.outputs(request_id, index)
                expected = self.replica.expected(request_id, index)
                if (request_id, index) in self.aborted:
                    assert told == expected[: len(told)]
                    continue
                assert told == expected
                if expected:
                    assert self.replica.finish_reason(request_id, index) is not None

    def _check_scores(self) -> None:
        """Each prompt token once and in order, all of them where any sample got a token."""
        for request_id in self.scored:
            request = self.replica.requests[request_id]
            expected = expected_scores(request, VOCAB)
            events = [e for e in self.replica.events if isinstance(e, Scored)]
            parts = [e.logprobs for e in events if e.request_id == request_id]
            has_tokens = any(self.replica.outputs(request_id, i) for i in range(request.sampling.n))
            assert parts or not has_tokens
            if parts:
                told = joined(parts)
                assert told.end == len(request.prompt) or not has_tokens
                assert told.chosen == expected.chosen[: len(told.chosen)]
                assert told.top_ids == expected.top_ids[: len(told.top_ids)]


EngineMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngine = EngineMachine.TestCase
