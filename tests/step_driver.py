"""Drives an executor as the engine does, without a scheduler: slots, blocks and plans by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from core.config import EngineConfig
from core.ids import BlockId, SlotId
from core.kv_layout import KvDtype
from core.sampling_params import SamplingParams
from engine.executor.interface import NewBlocks, SlotAdded, SlotResult, SlotWork, StepPlan
from engine.executor.native_executor import NativeExecutor
from engine.executor.native_model import load_model, native_tile_order
from engine.executor.torch_executor import TorchExecutor
from engine.models.read_spec import read_spec
from engine.models.spec import kv_dtype_for, kv_layout_for
from kv_transfer.region import HostRegion

GREEDY = SamplingParams(temperature=0.0)
# In torch, 2 threads collapse on a shared machine.
EXACT = EngineConfig(executor="torch", weights="f32", kv_dtype="f32", threads=1)
NATIVE = replace(EXACT, executor="native")
_TORCH_DTYPES = {
    KvDtype.F32: torch.float32,
    KvDtype.BF16: torch.bfloat16,
    KvDtype.INT8: torch.int8,
}


class StepDriver:
    """One executor on its own region, every block of which starts as NaN.

    Args:
        path: the model.
        num_blocks: in the pool.
        config: `EXACT` by default: float32 weights and cache, in torch.
        table: the native kernels to use; by default the best here.
    """

    def __init__(
        self, path: Path, num_blocks: int, config: EngineConfig = EXACT, table: Any = None
    ) -> None:
        self.spec = read_spec(path)
        kv_dtype = kv_dtype_for(config.kv_dtype)
        is_native = config.executor == "native"
        order = native_tile_order(kv_dtype) if is_native else "token_major"
        self.layout = kv_layout_for(self.spec, kv_dtype, config.block_size, order)
        self.region = HostRegion(num_blocks * self.layout.block_bytes)
        places = (config, self.layout, self.region, num_blocks)
        self.executor: TorchExecutor | NativeExecutor
        if is_native:
            model = load_model(self.spec, path, config.weights, table=table)
            self.executor = NativeExecutor(self.spec, model, *places)
        else:
            self.executor = TorchExecutor(self.spec, path, *places)
        self.torch_dtype = _TORCH_DTYPES[kv_dtype]
        self.tables: dict[int, list[BlockId]] = {}
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        self._number = 0
        self.poison(self._free)

    @property
    def torch_executor(self) -> TorchExecutor:
        """The executor, where it is torch's."""
        assert isinstance(self.executor, TorchExecutor)
        return self.executor

    def close(self) -> None:
        """Free the executor, then the region under it."""
        self.executor.close()
        self.region.close()

    def block(self, block_id: int) -> Tensor:
        """Return a block's elements, flat; a view of the pool."""
        size = self.layout.block_bytes
        raw = self.region.view()[block_id * size : (block_id + 1) * size]
        return torch.frombuffer(raw, dtype=self.torch_dtype)

    def poison(self, block_ids: Sequence[BlockId]) -> None:
        """Fill blocks with NaN; of int8, their scales are what is NaN."""
        size = self.layout.block_bytes
        for block_id in block_ids:
            self.region.view()[block_id * size : (block_id + 1) * size] = b"\xff" * size

    def take(self, count: int) -> tuple[BlockId, ...]:
        """Take free blocks, which hold NaN."""
        return tuple(self._free.pop() for _ in range(count))

    def added(
        self,
        slot: int,
        token_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        num_computed: int = 0,
        room: int = 32,
        **fields: Any,
    ) -> SlotAdded:
        """Return a new sequence with fresh blocks for its tokens and `room` more."""
        blocks = self.take(self.layout.blocks_for(len(token_ids) + room))
        self.tables[slot] = list(blocks)
        return SlotAdded(
            SlotId(slot),
            list(token_ids),
            fields.pop("num_prompt", len(token_ids)),
            num_computed,
            (blocks,),
            sampling,
            **fields,
        )

    def plan(self, *work: SlotWork, **delta: Any) -> StepPlan:
        """Return the next plan."""
        plan = StepPlan(number=self._number, work=work, **delta)
        self._number += 1
        return plan

    def step(
        self, *work: SlotWork, masks: Mapping[SlotId, Any] | None = None, **delta: Any
    ) -> tuple[SlotResult, ...]:
        """Submit, sample and collect one step."""
        handle = self.executor.submit(self.plan(*work, **delta))
        self.executor.sample(handle, masks)
        return self.executor.collect(handle).results

    def logits(self, *work: SlotWork, **delta: Any) -> Tensor:
        """Run one step for its logits: float32 [query tokens, vocab_size]."""
        return torch.as_tensor(self.executor.logits_of(self.plan(*work, **delta)))

    def chunked_logits(
        self, tokens: Sequence[int], size: int, num_decodes: int = 0, **fields: Any
    ) -> Tensor:
        """Return logits of all tokens, computed in slot 0 in chunks, then one by one."""
        end = len(tokens) - num_decodes
        sizes = [min(size, end - start) for start in range(0, end, size)] + [1] * num_decodes
        added = (self.added(0, tokens, room=0, **fields),)
        parts = [self.logits(work(0, sizes[0]), added=added)]
        parts += [self.logits(work(0, count)) for count in sizes[1:]]
        self.remove(0)
        return torch.cat(parts)

    def remove(self, *slots: int) -> None:
        """End sequences; their blocks are poisoned and free."""
        self.step(removed=tuple(SlotId(slot) for slot in slots))
        for slot in slots:
            self.poison(self.tables[slot])
            self._free += self.tables.pop(slot)

    def generate(
        self, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams = GREEDY
    ) -> list[int]:
        """Prefill a prompt in slot 0, then decode; return the tokens."""
        added = self.added(0, prompt, sampling, room=num_tokens)
        results = self.step(work(0, len(prompt), 1), added=(added,))
        tokens = list(results[0].token_ids)
        while len(tokens) < num_tokens:
            tokens += self.step(work(0, 1, 1))[0].token_ids
        self.remove(0)
        return tokens


def work(slot: int, num_query: int, num_samples: int = 0, drafts: Sequence[int] = ()) -> SlotWork:
    """Return a work item."""
    return SlotWork(SlotId(slot), num_query, num_samples, tuple(drafts))


def new_blocks(slot: int, *block_ids: BlockId) -> NewBlocks:
    """Return blocks appended to a slot's only table."""
    return NewBlocks(SlotId(slot), 0, block_ids)
