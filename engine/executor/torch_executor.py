"""The executor that computes: steps in torch, on the CPU or on a device, by the same code.

    submit   apply the delta -> rows -> indices -> forward pass     (queued on a device)
    sample   draw tokens, append them, advance or roll back lengths (queued)
    collect  wait, read tokens back

Nothing between submit and collect reads a value from the device or waits for it, and shapes follow
from the plan alone; on a device decode steps are padded to few of them (`step_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.clock import Clock, SystemClock
from core.config import EngineConfig
from core.ids import SlotId
from core.kv_layout import KvLayout
from core.memory_region import MemoryRegion
from engine.executor.compiled_program import CompiledProgram, Inputs, Outputs
from engine.executor.interface import Handle, SlotWork, StepPlan, StepResult
from engine.executor.pending_step import PendingStep, advance, read_results
from engine.executor.prompt_scoring import PromptScoring
from engine.executor.slot_state import SlotState
from engine.executor.step_inputs import ModelTables, StepInputs, build_inputs
from engine.executor.step_queue import StepQueue
from engine.executor.step_rows import arrange
from engine.kernels.cpu_features import cpu_flags, instruction_set, torch_weights
from engine.kernels.host_device import StepBuffer, to_device
from engine.kernels.paged_kv import PagedKv
from engine.kernels.reference import ReferenceKernels
from engine.kernels.rope import rope_tables, torch_frequencies
from engine.models.llama import compile_program
from engine.models.rope_frequencies import attention_factor
from engine.models.spec import ModelSpec
from engine.models.torch_weights import open_tensors
from engine.sampling.sampler import SampleRow, Sequences, sample


class TorchExecutor:
    """Implements `engine.executor.interface.Executor`.

    Args:
        spec: what `read_spec(path)` returned.
        path: a Hugging Face directory or a GGUF file.
        config: weights, slots, threads, device.
        layout: of the blocks.
        region: holds them; views follow its moves.
        num_blocks: blocks in the region.

    Attributes:
        clock: measures steps.
        on_signal: called with the layer index once this step's keys and values of it are written.

    Raises:
        ModelError: the weights do not fit the spec.
        ValueError: the layout is one that the kernels cannot address, or the region is not in the
            device's memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        path: Path,
        config: EngineConfig,
        layout: KvLayout,
        region: MemoryRegion,
        num_blocks: int,
    ) -> None:
        self._device = torch.device(config.device)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.on_signal: Callable[[int], None] | None = None
        self._layout = layout
        self.clock: Clock = SystemClock()
        self._pool = PagedKv(layout, region, num_blocks)
        if self._pool.device.type != self._device.type:
            msg = f"blocks in {self._pool.device.type} memory: steps on {config.device} need theirs"
            raise ValueError(msg)
        flags = cpu_flags()
        name = torch_weights(config.weights, config.device, flags)
        weights = torch.float32 if name == "f32" else torch.bfloat16
        self._kernels = ReferenceKernels(weights, self._pool.dtype, self._device)
        with torch.inference_mode():
            self._program = CompiledProgram(
                compile_program(spec), self._kernels, open_tensors(spec, path), self._device
            )
        max_tokens = min(spec.max_positions, num_blocks * layout.block_size) + 1
        self._slots = SlotState(config.max_slots, max_tokens, layout, self._device)
        self._tables = ModelTables(
            *rope_tables(
                max_tokens,
                torch_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling),
                attention_factor(spec.rope_scaling),
                self._device,
            ),
            attention_dtype=self._kernels.attention_dtype,
            window=spec.sliding_window,
            padded=self._device.type != "cpu",
        )
        capacity = 2 * config.chunk_tokens + 16 * config.max_slots
        self._buffer = StepBuffer(self._device, capacity, config.max_inflight)
        self._steps: StepQueue[PendingStep] = StepQueue()
        kv = layout.layers[0].dtype.value
        self._numerics = (
            f"torch-{torch.__version__}/{self._device.type}-{instruction_set(flags)}/"
            f"weights-{name}/kv-{kv}/tp-1"
        )

    @property
    def layout(self) -> KvLayout:
        """Layout of the blocks it reads and writes."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks that its region holds."""
        return self._pool.num_blocks

    @property
    def numerics(self) -> str:
        """Id of everything that can change a token."""
        return self._numerics

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Handle:
        """Apply the delta and run (on a device: launch) the forward pass."""
        started = self.clock.now()
        inputs, outputs, scoring = self._forward(plan)
        slots = [self._slots.by_id[work.slot] for work in plan.work]
        return self._steps.put(PendingStep(plan, slots, inputs, outputs, scoring, started))

    @torch.inference_mode()
    def sample(self, handle: Handle, masks: Mapping[SlotId, Any] | None = None) -> None:
        """Draw the step's tokens and advance its slots."""
        step = self._steps.to_sample(handle)
        if step.outputs is not None:
            step.sampled = sample(
                step.inputs.logits_of_entries(step.outputs.logits),
                self._sample_rows(step.inputs, masks or {}),
                Sequences(
                    token_ids=self._slots.token_ids,
                    slots=step.inputs.entry_slots,
                    num_prompt=step.inputs.entry_num_prompt,
                    positions=step.inputs.entry_positions,
                    longest=step.inputs.rows.longest,
                ),
            )
        advance(step, self._slots)

    def collect(self, handle: Handle) -> StepResult:
        """Wait for the oldest step."""
        step = self._steps.take(handle)
        results = read_results(step)
        return StepResult(step.plan.number, results, self.clock.now() - step.started)

    @torch.inference_mode()
    def logits_of(self, plan: StepPlan) -> Tensor:
        """Run a plan that samples nothing; return all rows' logits instead (for oracles).

        The same program on the same rows as `submit`, but every row is selected.

        Returns:
            float32 [query tokens, vocab_size], in the order of the plan's work.
        """
        inputs, outputs, scoring = self._forward(plan, select_all=True)
        assert outputs is not None
        slots = [self._slots.by_id[work.slot] for work in plan.work]
        advance(PendingStep(plan, slots, inputs, None, scoring, 0.0), self._slots)
        return outputs.logits

    def close(self) -> None:
        """Drop weights, slots and views; the region stays its owner's."""
        self._steps.clear()
        del self._program, self._slots, self._pool

    def _forward(
        self, plan: StepPlan, *, select_all: bool = False
    ) -> tuple[StepInputs, Outputs | None, PromptScoring]:
        self._steps.admit(plan)
        self._pool.refresh()
        self._slots.apply(plan)
        self._pool.zero(plan.zeroes)
        for copy in plan.copies:
            self._pool.copy(copy.source, copy.target)
        self._zero_tails(plan.work)
        lengths = {item.slot: self._slots.by_id[item.slot].length for item in plan.work}
        rows = arrange(plan.work, lengths, self._layout.block_size, padded=self._tables.padded)
        inputs = build_inputs(rows, plan.work, self._slots, self._pool, self._buffer, self._tables)
        scoring = PromptScoring(plan.work, rows, self._slots)
        selected = inputs.selected
        if select_all:
            every = [row for work_rows in rows.by_work for row in work_rows]
            selected = torch.tensor(every, device=self._device)
        outputs = None
        if rows.slots:
            outputs = self._program.run(
                Inputs(
                    inputs.token_ids,
                    inputs.batch,
                    self._pool,
                    selected,
                    self.on_signal,
                    scoring.score if scoring.wanted else None,
                )
            )
        return inputs, outputs, scoring

    def _zero_tails(self, work: Sequence[SlotWork]) -> None:
        """Zero what follows a slot's last position in its block, once a block.

        Attention reads whole blocks and gives those positions the weight zero, which is harmless
        only if they are finite. Memory that was just allocated, received or copied may not be.
        """
        block_size = self._layout.block_size
        for item in work:
            slot = self._slots.by_id[item.slot]
            end = slot.length + item.num_query
            if end > slot.finite_to:
                if end % block_size:
                    self._pool.zero_tail(slot.table[end // block_size], end % block_size)
                slot.finite_to = -(-end // block_size) * block_size

    def _sample_rows(self, inputs: StepInputs, masks: Mapping[SlotId, Any]) -> list[SampleRow]:
        allowed = {
            slot: to_device(torch.as_tensor(mask, dtype=torch.bool), self._device)
            for slot, mask in masks.items()
        }
        return [
            SampleRow(
                sampling=self._slots.by_id[slot].sampling,
                sample_index=sample_index,
                allowed=allowed.get(slot),
            )
            for slot, sample_index in inputs.entries
        ]
