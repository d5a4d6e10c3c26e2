"""What a worker's `/metrics` shows: the last snapshots of what lives on other threads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from core.worker_record import WorkerRecord
from decode_pool.metrics import DecodeCollector
from decode_pool.worker import DecodeWorker
from engine.events import EngineStats
from engine.metrics import EngineCollector
from kv_transfer.metrics import FabricMetrics
from prefill_pool.metrics import PrefillCollector
from prefill_pool.worker import PrefillWorker


class WorkerMetrics:
    """The registry, and what keeps it up to date.

    Attributes:
        registry: what `/metrics` shows.
        fabric: its `observe` is the `TransferThread`'s `on_outcome`.
    """

    def __init__(self, record: WorkerRecord, decode: DecodeWorker, prefill: PrefillWorker) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.fabric = FabricMetrics(
            self.registry,
            model_name=record.model,
            engine=record.worker_id,
            backend=record.fabric,
        )
        self.registry.register(DecodeCollector(decode.stats))
        self.registry.register(PrefillCollector(prefill.stats))
        self._record = record
        self._stats: EngineStats | None = None

    def show_engine(self, stats: EngineStats) -> None:
        """Take a snapshot of the engine; its series appear with the first."""
        is_first = self._stats is None
        self._stats = stats
        if is_first:
            record = self._record
            collector = EngineCollector(
                self._last_stats,
                model_name=record.model,
                engine=record.worker_id,
                block_size=record.block_size,
            )
            self.registry.register(collector)

    def _last_stats(self) -> EngineStats:
        assert self._stats is not None, "registered after its first snapshot"
        return self._stats
