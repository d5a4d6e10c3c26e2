"""The executor that computes on CPUs without torch: one call into the native library a step.

    submit   apply the delta -> rows -> forward pass
    sample   draw tokens, append them, advance or roll back lengths
    collect  read tokens back

The library computes in the caller's thread and its own, with the GIL released.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from core.clock import Clock, SystemClock
from core.config import EngineConfig
from core.ids import SlotId
from core.kv_layout import KvLayout
from core.memory_region import MemoryRegion
from engine.executor.interface import Handle, StepPlan, StepResult
from engine.executor.native_model import NativeModel, native_tile_order
from engine.executor.native_runner import NativeRunner, signal_callback
from engine.executor.native_slots import NativeSlots
from engine.executor.native_step import NativeStep
from engine.executor.step_queue import StepQueue
from engine.kernels.cpu.library import build_id
from engine.models.spec import ModelSpec


class NativeExecutor:
    """Implements `engine.executor.interface.Executor`.

    Args:
        spec: what `read_spec(path)` returned.
        model: what `load_model` made of its file.
        config: slots, threads.
        layout: of the blocks, with keys in the kernels' order (`native_tile_order`).
        region: holds them; its address is read anew each step.
        num_blocks: blocks in the region.

    Attributes:
        clock: measures steps.

    Raises:
        ModelError: the library cannot run the model.
        ValueError: the layout is one that the kernels cannot address.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: NativeModel,
        config: EngineConfig,
        layout: KvLayout,
        region: MemoryRegion,
        num_blocks: int,
    ) -> None:
        self.clock: Clock = SystemClock()
        self._layout = layout
        self._region = region
        self._num_blocks = num_blocks
        self._spec = spec
        _check_region(layout, region, num_blocks)
        max_tokens = min(spec.max_positions, num_blocks * layout.block_size) + 1
        self._slots = NativeSlots(config.max_slots, max_tokens, layout, spec.vocab_size)
        self._runner = NativeRunner(
            spec,
            model,
            layout,
            max_positions=max_tokens,
            num_threads=config.threads or len(os.sched_getaffinity(0)),
        )
        self._inputs = self._slots.inputs()
        self._on_signal: Callable[[int], None] | None = None
        self._steps: StepQueue[NativeStep] = StepQueue()
        self._last_applied = -1  # plan whose slots are applied
        self._numerics = (
            f"native-{build_id()}/{model.table.name.decode()}/weights-{model.kind}/"
            f"kv-{layout.layers[0].dtype.value}/tp-1"
        )

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
        """Id of everything that can change a token."""
        return self._numerics

    @property
    def on_signal(self) -> Callable[[int], None] | None:
        """Called with the layer index once a step's keys and values of it are written."""
        return self._on_signal

    @on_signal.setter
    def on_signal(self, on_signal: Callable[[int], None] | None) -> None:
        self._on_signal = on_signal
        self._inputs.on_signal = signal_callback(on_signal)

    def submit(self, plan: StepPlan) -> Handle:
        """Apply the delta and run the forward pass."""
        return self.submit_prepared(plan, None)

    def prepare(self, plan: StepPlan) -> NativeStep | None:
        """Lay the next step out while the one before runs, in another thread.

        Returns:
            what `submit_prepared` wants; None, and nothing has changed, where the layout depends on
            what runs: slots come, go or get another block, or tokens follow those to be drawn.
        """
        is_next = plan.number == self._last_applied + 1
        changes = plan.added or plan.removed or plan.table_edits
        if not is_next or changes or any(item.drafts for item in plan.work):
            return None
        if any(self._slots.by_id[item.slot].prompt_logprobs is not None for item in plan.work):
            return None
        return self._lay_out(plan)

    def submit_prepared(self, plan: StepPlan, prepared: NativeStep | None) -> Handle:
        """Submit a plan, laid out already unless `prepared` is None."""
        return self._steps.put(self._forward(plan, prepared))

    def sample(self, handle: Handle, masks: Mapping[SlotId, Any] | None = None) -> None:
        """Draw the step's tokens and advance its slots."""
        step = self._steps.to_sample(handle)
        wishes = step.wishes(masks or {}, self._slots)
        granted = self._runner.refine(wishes) if wishes else None
        drawn = self._runner.draw(len(step.plan.work))
        step.finish(drawn, granted.logprobs() if granted is not None else {})
        step.ended = self.clock.now()

    def collect(self, handle: Handle) -> StepResult:
        """Return the oldest step's results; may run in another thread, beside later steps."""
        step = self._steps.take(handle)
        return StepResult(step.plan.number, step.results(), step.ended - step.started)

    def logits_of(self, plan: StepPlan) -> npt.NDArray[np.float32]:
        """Run a plan that samples nothing; return all rows' logits instead (for oracles).

        Returns:
            float32 [query tokens, vocab_size], in the order of the plan's work.
        """
        step = self._forward(plan, self._lay_out(plan, selects_all=True))
        logits = self._runner.logits(step.num_rows)
        self._runner.draw(len(plan.work))  # nothing, but the slots move on
        return logits

    def close(self) -> None:
        """Free everything but the region."""
        self._steps.clear()
        self._runner.close()

    def _lay_out(self, plan: StepPlan, *, selects_all: bool = False) -> NativeStep:
        self._slots.apply(plan)
        self._last_applied = plan.number
        return NativeStep(
            plan,
            self._slots,
            hidden_size=self._spec.hidden_size,
            vocab_size=self._spec.vocab_size,
            selects_all=selects_all,
        )

    def _forward(self, plan: StepPlan, prepared: NativeStep | None) -> NativeStep:
        started = self.clock.now()
        self._steps.admit(plan)
        step = prepared or self._lay_out(plan)
        step.started = started
        self._inputs.region = self._region.address  # a fence may have moved it
        kept = step.fill(self._inputs)
        self._runner.forward(self._inputs)
        del kept
        return step


def _check_region(layout: KvLayout, region: MemoryRegion, num_blocks: int) -> None:
    if region.num_bytes < num_blocks * layout.block_bytes:
        msg = (
            f"{num_blocks} blocks of {layout.block_bytes} bytes do not fit into a region of "
            f"{region.num_bytes} bytes"
        )
        raise ValueError(msg)
    for layer in layout.layers:
        wanted = native_tile_order(layer.dtype)
        if layer.tile_order != wanted:
            msg = f"tile order {layer.tile_order!r}: the native kernels read {wanted!r}"
            raise ValueError(msg)
