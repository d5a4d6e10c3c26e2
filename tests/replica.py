"""A whole engine on the mock executor, for tests: poisoned memory, a peer's writes, an oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from core.config import EngineConfig
from core.ids import BlockId, RequestId
from core.request import EngineRequest, FinishReason
from core.sampling_params import SamplingParams
from engine.engine import Engine, settings_for
from engine.events import Event, Generated, Mode
from engine.executor.interface import StepPlan
from engine.executor.mock_executor import MockDevice, MockExecutor
from engine.executor.mock_pool import MockPool, mock_layout
from engine.executor.mock_tokens import expected_tokens, marks_of
from engine.memory.block_pool import BlockState
from engine.scheduling.sequence import Sequence as RunningSequence
from engine.scheduling.settings import Drafter
from kv_transfer.bytes_region import BytesRegion

VOCAB = 1000
EOS = 7
POISON = 0xFF


def poisoned_region(num_bytes: int) -> BytesRegion:
    """Return memory whose every byte is poison."""
    region = BytesRegion(num_bytes)
    region.view()[:] = bytes([POISON]) * num_bytes
    return region


class Replica:
    """An engine on the mock executor that records its plans and events.

    Free blocks are poisoned before each step, so that nothing can live on in one.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_inflight: int = 1,
        accept: Callable[[int], int] | None = None,
        drafter: Drafter | None = None,
        **config: int,
    ) -> None:
        self.layout = mock_layout(block_size)
        self.region = poisoned_region(num_blocks * self.layout.block_bytes)
        self.config = EngineConfig(
            executor="mock",
            block_size=block_size,
            max_inflight=max_inflight,
            mock_step_s=0.0,
            mock_prompt_token_s=0.0,
            **config,  # pyright: ignore[reportArgumentType] - whole numbers only
        )
        self.executor = MockExecutor(
            self.layout,
            self.region,
            num_blocks=num_blocks,
            vocab_size=VOCAB,
            config=self.config,
            device=MockDevice(accept=accept),
        )
        settings = settings_for(
            self.executor,
            self.config,
            max_model_len=num_blocks * block_size,
            max_receiving_share=0.3,
            vocab_size=VOCAB,
        )
        self.engine = Engine(
            self.executor, settings, fingerprint=b"m", max_inflight=max_inflight, drafter=drafter
        )
        self.scheduler = self.engine._scheduler
        self.pool = self.scheduler._state.memory.pool
        self.peer = MockPool(self.layout, self.region, num_blocks)
        self.plans: list[StepPlan] = []
        self.events: list[Event] = []
        self.requests: dict[RequestId, EngineRequest] = {}
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._recorded_schedule

    def add(self, prompt: Sequence[int], mode: Mode = Mode.LOCAL, **sampling: object) -> RequestId:
        """Queue a request of these tokens and `SamplingParams` fields; returns its id."""
        request_id = RequestId(f"r{len(self.requests)}")
        params = SamplingParams(**{"eos_token_ids": (EOS,), **sampling})  # pyright: ignore[reportArgumentType] - fields by name
        request = EngineRequest(request_id, tuple(prompt), params)
        self.requests[request_id] = request
        self.engine.add(request, mode)
        return request_id

    def step(self) -> list[Event]:
        """Poison what is free, step, check all invariants."""
        self.poison_free_blocks()
        events = self.engine.step()
        self.events += events
        self.engine.check_invariants()
        return events

    def run(self, max_steps: int = 10_000) -> None:
        """Step until there is nothing to do."""
        for _ in range(max_steps):
            if not self.engine.has_work():
                return
            self.step()
        msg = f"still busy after {max_steps} steps"
        raise AssertionError(msg)

    def poison_free_blocks(self) -> None:
        """Overwrite every free block."""
        for block_id in range(self.pool.num_blocks):
            if self.pool.state(BlockId(block_id)) is BlockState.FREE:
                self.fill(BlockId(block_id), POISON)

    def fill(self, block_id: BlockId, value: int) -> None:
        """Overwrite a block with one byte."""
        size = self.layout.block_bytes
        self.region.view()[block_id * size : (block_id + 1) * size] = bytes([value]) * size

    def bytes_of(self, block_id: BlockId) -> bytes:
        """Return a block's bytes."""
        size = self.layout.block_bytes
        return bytes(self.region.view()[block_id * size : (block_id + 1) * size])

    def write_kv(self, tokens: Sequence[int], block_ids: Sequence[BlockId], first: int) -> None:
        """What a peer's push does: whole blocks of `tokens` from block `first` on."""
        self.peer.refresh()
        for block_id in block_ids[first:]:
            self.fill(block_id, 0)
        start = first * self.layout.block_size
        self.peer.write(block_ids, start, marks_of(tokens[start:], start))

    def holds_kv(self, tokens: Sequence[int], block_ids: Sequence[BlockId], end: int) -> bool:
        """Whether the KV of the first `end` tokens is in these blocks."""
        self.peer.refresh()
        return bool((self.peer.read(block_ids, end) == marks_of(tokens[:end], 0)).all())

    def outputs(self, request_id: RequestId, sample_index: int = 0) -> tuple[int, ...]:
        """Return a sample's tokens as its events told them, contiguous from the first told."""
        tokens: list[int] = []
        start: int | None = None
        for event in self.generated(request_id, sample_index):
            start = event.start_index if start is None else start
            assert event.start_index == start + len(tokens)
            tokens += event.token_ids
        return tuple(tokens)

    def finish_reason(self, request_id: RequestId, sample_index: int = 0) -> FinishReason | None:
        """Return why a sample ended; asserts that nothing came after that."""
        events = self.generated(request_id, sample_index)
        assert all(event.finish_reason is None for event in events[:-1])
        return events[-1].finish_reason if events else None

    def generated(self, request_id: RequestId, sample_index: int) -> list[Generated]:
        """Return a sample's `Generated` events."""
        return [
            event
            for event in self.events
            if isinstance(event, Generated)
            and (event.request_id, event.sample_index) == (request_id, sample_index)
        ]

    def expected(self, request_id: RequestId, sample_index: int = 0) -> tuple[int, ...]:
        """Return the oracle's tokens."""
        request = self.requests[request_id]
        forced = request.outputs[sample_index] if request.outputs else ()
        tokens = expected_tokens(
            request.prompt,
            request.sampling,
            vocab_size=VOCAB,
            sample_index=sample_index,
            outputs=forced,
        )
        return tokens[len(forced) :]

    def assert_all_right(self) -> None:
        """Assert that every sample of every request equals the oracle and has ended."""
        for request_id, request in self.requests.items():
            for index in range(request.sampling.n):
                assert self.outputs(request_id, index) == self.expected(request_id, index)
                assert self.finish_reason(request_id, index) is not None

    def assert_idle(self) -> None:
        """Assert that every block is free or cached and that nothing is left."""
        counts = self.pool.counts()
        assert (counts.owned, counts.reserved, counts.quarantined) == (0, 0, 0)
        assert counts.free + counts.cached == counts.total
        assert not self.scheduler._state.runs
        assert not self.engine.has_work()

    def _recorded_schedule(self) -> StepPlan | None:
        """Schedule, and check the rule that no running sequence starves beside a chunk."""
        batch = self.scheduler._state.batch
        decoding = [s for s in batch if s.slot is not None and s.is_decoding()]
        plan = self._schedule()
        if plan is not None:
            self.plans.append(plan)
            assert plan.num_prompt_tokens <= self.config.chunk_tokens
            if plan.num_prompt_tokens:
                worked = {work.slot for work in plan.work}
                assert all(s.slot in worked for s in decoding if s in set(batch))
        return plan


class OracleDrafter:
    """Drafts what will be sampled, often; wrong where `rng` says so, or where pending steps accept
    more or less than one token each."""

    max_drafts = 3

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._known: dict[tuple[RequestId, int], tuple[int, ...]] = {}

    def propose(self, sequence: RunningSequence, count: int) -> Sequence[int]:
        """Return the oracle's tokens, the last one sometimes spoiled."""
        request = sequence.run.request
        key = (request.request_id, sequence.sample_index)
        if key not in self._known:
            self._known[key] = expected_tokens(
                request.prompt, request.sampling, vocab_size=VOCAB, sample_index=key[1]
            )
        known = self._known[key]
        start = sequence.num_outputs + sum(p.max_tokens > 0 for p in sequence.pending)
        drafts = list(known[start : start + self._rng.randint(0, count)])
        if drafts and self._rng.random() < 0.3:
            drafts[-1] = VOCAB - 1 - drafts[-1]
        return drafts
