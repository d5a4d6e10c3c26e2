"""The least that a decode step or a prompt can take on this machine now."""

from __future__ import annotations

from pathlib import Path

from bench.calibration import Calibration
from bench.engine_child import STEPS, Task
from bench.peak import PeakMeter
from core.config import Config
from deploy.worker.replica import plan_replica
from engine.executor.native_model import load_model
from engine.models.read_spec import read_spec


class Limits:
    """Of the native weights and a bf16 cache.

    Args:
        model: its file.
        calibration: reads memory.
        threads: of both.
    """

    def __init__(self, model: Path, calibration: Calibration, threads: int) -> None:
        config = Config()
        plan = plan_replica(config, model)
        self._spec = read_spec(model)
        self._calibration = calibration
        self._peak = PeakMeter(threads)
        self._token_bytes = plan.layout.block_bytes / plan.layout.block_size
        self._weight_bytes = len(load_model(self._spec, model, "native").memory)

    def read_s(self, task: Task) -> float:
        """Return the seconds of reading the weights once, and all sequences' keys and values."""
        mean_context = task.context + STEPS / 2
        cache = task.batch * mean_context * self._token_bytes
        return self._calibration.read_seconds(self._weight_bytes + cache)

    def multiply_s(self, task: Task) -> float:
        """Return the seconds of a prompt's multiplications; see `Peak.prefill_s`."""
        return self._peak.measure().prefill_s(self._spec, task.context)
