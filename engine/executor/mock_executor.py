"""An executor without a model: a timing model whose tokens come from the pool's bytes.

It does to the pool what a real one does (zeroes, copies, KV of every query token, through the block
tables) and computes each token from the marks that it reads back, so a late write, a block freed
too early or a wrong table shows as a wrong token (see handoff.md's proofs). Steps touch the pool
when they are collected, as late as the interface allows: what was freed too early is overwritten.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from core.clock import Clock, SystemClock
from core.config import EngineConfig
from core.ids import BlockId, SlotId
from core.kv_layout import KvLayout
from core.memory_region import MemoryRegion
from core.request import PromptLogprobs, TokenLogprobs
from engine.executor.interface import (
    Handle,
    SlotAdded,
    SlotResult,
    SlotWork,
    StepPlan,
    StepResult,
    refuse_adapter,
)
from engine.executor.mock_pool import MockPool
from engine.executor.mock_tokens import (
    digest_of,
    excluded_tokens,
    logprobs_of,
    marks_of,
    next_token,
    prompt_logprobs_of,
)
from engine.token_rules import completing_ids


class MockDevice(msgspec.Struct, frozen=True):
    """How the modelled device behaves.

    Attributes:
        clock, sleep: collecting a step sleeps out its modelled time; a simulation moves its own.
        accept: limits the tokens that one sampling may yield: from the number possible (1 + right
            drafts, at least 1) to a smaller one, also 0. None: all.
        natural_stops: whether EOS and stop tokens are drawn like others; else only forced ones end.
    """

    clock: Clock = SystemClock()
    sleep: Callable[[float], None] = time.sleep
    accept: Callable[[int], int] | None = None
    natural_stops: bool = False


class _Slot:
    """A row of the batch: what the interface says that an executor keeps."""

    def __init__(self, added: SlotAdded) -> None:
        self.sampling = added.sampling
        self.sample_index = added.sample_index
        self.token_ids = list(added.token_ids)
        self.num_prompt = added.num_prompt
        self.prompt_logprobs = added.prompt_logprobs
        self.num_computed = added.num_computed
        self.tables: list[list[BlockId]] = [list(table) for table in added.block_tables]


class MockExecutor:
    """Implements `engine.executor.interface.Executor`; one KV group.

    Args:
        layout: at least 8 bytes a token in each tile; `mock_layout` is a small one.
        region: holds at least `num_blocks` blocks.
        vocab_size: tokens are drawn from 0 to vocab_size - 1.
        config: its `mock_step_s` and `mock_prompt_token_s` are the timing model.
    """

    def __init__(
        self,
        layout: KvLayout,
        region: MemoryRegion,
        *,
        num_blocks: int,
        vocab_size: int,
        config: EngineConfig,
        device: MockDevice | None = None,
    ) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._config = config
        self._device = device or MockDevice()
        self._pool = MockPool(layout, region, num_blocks)
        self._slots: dict[SlotId, _Slot] = {}
        self._submitted: deque[tuple[StepPlan, float]] = deque()
        self._masks: dict[Handle, Mapping[SlotId, Any]] = {}
        self._free_at = 0.0

    @property
    def layout(self) -> KvLayout:
        """Layout of the blocks it reads and writes."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks that its region holds."""
        return self._num_blocks

    @property
    def numerics(self) -> str:
        """Marks are exact everywhere."""
        return "mock"

    def submit(self, plan: StepPlan) -> Handle:
        """Queue a step on the modelled device; returns at once."""
        now = self._device.clock.now()
        self._free_at = max(now, self._free_at) + self._seconds(plan)
        self._submitted.append((plan, self._free_at))
        return Handle(plan.number)

    def sample(self, handle: Handle, masks: Mapping[SlotId, Any] | None = None) -> None:
        """Remember the step's masks (bool [vocab] by slot)."""
        self._masks[handle] = masks or {}

    def collect(self, handle: Handle) -> StepResult:
        """Sleep until the oldest step is over on the device, then return its result."""
        plan, done_at = self._submitted.popleft()
        assert plan.number == handle
        wait_s = done_at - self._device.clock.now()
        if wait_s > 0:
            self._device.sleep(wait_s)
        masks = self._masks.pop(handle)
        self._pool.refresh()
        self._apply_delta(plan)
        results = tuple(self._run(work, masks.get(work.slot)) for work in plan.work)
        return StepResult(plan.number, results, self._seconds(plan))

    def close(self) -> None:
        """Let go of the region."""
        self._slots.clear()
        self._pool.close()

    def _seconds(self, plan: StepPlan) -> float:
        prompt_s = plan.num_prompt_tokens * self._config.mock_prompt_token_s
        return self._config.mock_step_s + prompt_s

    def _apply_delta(self, plan: StepPlan) -> None:
        for slot in plan.removed:
            del self._slots[slot]
        for added in plan.added:
            assert added.slot not in self._slots
            refuse_adapter(added)
            self._slots[added.slot] = _Slot(added)
        for new in plan.new_blocks:
            self._slots[new.slot].tables[new.group].extend(new.block_ids)
        for edit in plan.table_edits:
            self._slots[edit.slot].tables[edit.group][edit.index] = edit.block_id
        for block_id in plan.zeroes:
            self._pool.zero(block_id)
        for copy in plan.copies:
            self._pool.copy(copy.source, copy.target)

    def _run(self, work: SlotWork, mask: Any) -> SlotResult:
        slot = self._slots[work.slot]
        start, end = slot.num_computed, slot.num_computed + work.num_query
        tokens = [*slot.token_ids, *work.drafts][start:end]
        assert len(tokens) == work.num_query
        self._pool.write(slot.tables[0], start, marks_of(tokens, start))
        slot.num_computed = end
        scored = self._score(slot, start + 1, min(end + 1, slot.num_prompt))
        if not work.num_samples:
            return SlotResult(work.slot, (), prompt_logprobs=scored)
        return msgspec.structs.replace(self._sample(slot, work, mask), prompt_logprobs=scored)

    def _sample(self, slot: _Slot, work: SlotWork, mask: Any) -> SlotResult:
        end = slot.num_computed
        num_known = end - len(work.drafts)
        assert num_known == len(slot.token_ids)
        if work.num_samples > 1:
            drawn = [self._draw(slot, (), i, mask) for i in range(work.num_samples)]
            return self._result(work, slot, drawn)
        accepted = self._verify(slot, work, mask)
        slot.token_ids.extend(accepted)
        slot.num_computed = len(slot.token_ids) - 1
        return self._result(work, slot, accepted)

    def _score(self, slot: _Slot, first: int, last: int) -> PromptLogprobs | None:
        """Return the log-probabilities of prompt tokens `first` to `last` - 1, where asked for."""
        if slot.prompt_logprobs is None or first >= last:
            return None
        marks = self._pool.read(slot.tables[0], last - 1)
        prompt = slot.token_ids[:last]
        return prompt_logprobs_of(marks, prompt, first, slot.prompt_logprobs, self._vocab_size)

    def _verify(self, slot: _Slot, work: SlotWork, mask: Any) -> list[int]:
        """Sample after each draft as long as the drafts before it equal what was sampled."""
        accepted: list[int] = []
        for draft in (*work.drafts, None):
            token_id = self._draw(slot, accepted, slot.sample_index, mask)
            accepted.append(token_id)
            if token_id != draft:
                break
        accept = self._device.accept
        return accepted if accept is None else accepted[: accept(len(accepted))]

    def _draw(self, slot: _Slot, accepted: Sequence[int], sample_index: int, mask: Any) -> int:
        """Return a token after the slot's known ones and those that this step accepted."""
        num_tokens = len(slot.token_ids) + len(accepted)
        marks = self._pool.read(slot.tables[0], num_tokens)
        excluded = excluded_tokens(
            slot.sampling,
            num_tokens - slot.num_prompt,
            natural_stops=self._device.natural_stops,
        )
        if slot.sampling.bad_words:
            generated = [*slot.token_ids[slot.num_prompt :], *accepted]
            excluded |= completing_ids(slot.sampling.bad_words, generated)
        if mask is not None:
            excluded |= frozenset(np.flatnonzero(~np.asarray(mask, dtype=bool)).tolist())
        return next_token(
            digest_of(marks),
            num_tokens,
            slot.sampling,
            sample_index=sample_index,
            excluded=excluded,
            vocab_size=self._vocab_size,
        )

    def _result(self, work: SlotWork, slot: _Slot, token_ids: list[int]) -> SlotResult:
        logprobs: list[TokenLogprobs] = []
        for token_id in token_ids:
            entry = logprobs_of(token_id, slot.sampling, self._vocab_size)
            if entry is not None:
                logprobs.append(entry)
        return SlotResult(work.slot, tuple(token_ids), tuple(logprobs))
