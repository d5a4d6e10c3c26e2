"""The seam between decisions and arithmetic: a numbered StepPlan in, a StepResult out.

One driver sends each plan to all ranks; ranks decide nothing. A plan is a delta: slots that come
and go, new block ids, and how many query tokens each working slot gets. There is no prefill phase
and no decode phase, only slots whose computed length catches up with their known tokens: a chunk
has n query tokens and no result, a decode has 1 and 1, speculation has n and 1 to n.

The executor keeps, for each slot: its token ids, its computed length, its block tables. A step on a
slot reads tokens[length : length + num_query] and advances the length by num_query; where results
are sampled, the accepted tokens are appended, and the length is rolled back to the number of
positions whose input token was accepted. "The last token of slot s" is thus known to the executor
before the driver has seen it, which is what lets `max_inflight` plans overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NewType, Protocol

import msgspec

from core.ids import BlockId, SlotId
from core.kv_layout import KvLayout
from core.request import PromptLogprobs, TokenLogprobs
from core.sampling_params import SamplingParams

Handle = NewType("Handle", int)
"""Names a submitted step until it is collected: the plan's number."""


class SlotAdded(msgspec.Struct, frozen=True):
    """A sequence enters the batch.

    Attributes:
        token_ids: prompt and outputs known so far, at least one.
        num_prompt: how many of them are prompt; penalties on output count the rest.
        num_computed: positions whose KV is in its blocks already, less than `len(token_ids)`.
        block_tables: one list of block ids per KV group, covering at least `num_computed`.
        sample_index: which of the request's n samples; keys the noise.
        adapter_id: 0 is the base model; executors without adapters refuse others
            (`refuse_adapter`).
        return_hidden: whether results carry the final hidden state of sampled positions.
        prompt_logprobs: alternatives to return for each prompt token whose predecessor is computed
            here; None: prompt tokens are not scored.
    """

    slot: SlotId
    token_ids: Sequence[int]
    num_prompt: int
    num_computed: int
    block_tables: tuple[tuple[BlockId, ...], ...]
    sampling: SamplingParams
    sample_index: int = 0
    adapter_id: int = 0
    return_hidden: bool = False
    prompt_logprobs: int | None = None


class NewBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to a slot's table of one KV group before this step's forward."""

    slot: SlotId
    group: int
    block_ids: tuple[BlockId, ...]


class TableEdit(msgspec.Struct, frozen=True, array_like=True):
    """Entry `index` of a slot's table now names another block (after a copy-on-write)."""

    slot: SlotId
    group: int
    index: int
    block_id: BlockId


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy a whole block before this step's forward."""

    source: BlockId
    target: BlockId


class SlotWork(msgspec.Struct, frozen=True, array_like=True):
    """What a slot does in this step.

    Attributes:
        num_query: query tokens, at least 1.
        num_samples: first tokens to draw after the last query token: 0 for a chunk that is not the
            last; n at the end of a prompt with n samples (drawn for sample indices 0..n-1).
        drafts: proposed tokens after the slot's last token; num_query is then 1 + len(drafts), the
            result 1 to num_query tokens.
    """

    slot: SlotId
    num_query: int
    num_samples: int
    drafts: tuple[int, ...] = ()


class StepPlan(msgspec.Struct, frozen=True):
    """One step as a delta to the last, applied in the order of the fields.

    Attributes:
        number: counts from 0 without gaps.
        zeroes: blocks allocated for a partial tail, zeroed before use (stale bytes leak between
            tenants, and 0 x NaN poisons attention).
    """

    number: int
    removed: tuple[SlotId, ...] = ()
    added: tuple[SlotAdded, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    table_edits: tuple[TableEdit, ...] = ()
    zeroes: tuple[BlockId, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    work: tuple[SlotWork, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Query tokens of chunks (work items of more than one query token or without a sample)."""
        return sum(
            w.num_query
            for w in self.work
            if not w.drafts and (w.num_query > 1 or not w.num_samples)
        )


class SlotResult(msgspec.Struct, frozen=True):
    """What came of one work item.

    Attributes:
        token_ids: for num_samples <= 1, the 0 to num_query accepted tokens in order; for
            num_samples > 1, one token a sample index.
        logprobs: one a token where the slot's sampling asks for it, else empty.
        hidden: [hidden_size] float32 where asked for.
        prompt_logprobs: of the prompt tokens that follow the work item's query tokens, where the
            slot asks for them and there are any.
    """

    slot: SlotId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: Sequence[float] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class StepResult(msgspec.Struct, frozen=True):
    """Results in the order of the plan's work, and the seconds that the step took the device."""

    number: int
    results: tuple[SlotResult, ...]
    seconds: float


def refuse_adapter(added: SlotAdded) -> None:
    """Refuse a slot that asks for more than the base model.

    Raises:
        ValueError: its adapter is not 0: computing it without would be silently wrong.
    """
    if added.adapter_id:
        msg = f"slot {added.slot}: adapter {added.adapter_id}: this executor has adapter 0 only"
        raise ValueError(msg)


class Executor(Protocol):
    """Runs steps in order. Not thread-safe; owned by the engine's thread. Owns no KV memory."""

    @property
    def layout(self) -> KvLayout:
        """Layout of the blocks it reads and writes."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks that its region holds."""
        ...

    @property
    def numerics(self) -> str:
        """Id of everything that can change a token: build, instruction set, dtypes, TP size."""
        ...

    def submit(self, plan: StepPlan) -> Handle:
        """Start a step; may return before it is computed. Steps run in the order submitted."""
        ...

    def sample(self, handle: Handle, masks: Mapping[SlotId, Any] | None = None) -> None:
        """Let the step sample, once per submitted step.

        Args:
            handle: a submitted step.
            masks: allowed tokens per slot, bool [vocab]; slots without an entry are free.
        """
        ...

    def collect(self, handle: Handle) -> StepResult:
        """Wait for the oldest submitted step and return its result."""
        ...

    def close(self) -> None:
        """Free everything but the region."""
        ...
