"""What a prefill worker is wired to; the composition root makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.memory_region import MemoryRegion
from engine.engine_driver import EngineDriver
from kv_transfer.transfer_driver import TransferDriver
from kv_transfer.transport import Transport


@dataclass(frozen=True, slots=True)
class PrefillPorts:
    """Started before `PrefillWorker.run`, stopped after it by whoever made them.

    Attributes:
        engine: its `on_events` brings all events to `PrefillWorker.on_engine_events`. A decode
            pool may be on the same one.
        fabric: its transport has `region` registered. `on_failure` of both is
            `PrefillWorker.on_failure`, or that of the decode pool beside it: either ends the
            process.
        new_transport: makes a fresh agent of the same name, when the old one must be destroyed to
            let go of blocks; called on the fabric's thread.
        on_transport: hears what the fabric's writes go over ("ucx (cma)") when it becomes known.
        on_renewed: the agent is a fresh one, whose address those who write here must learn.
    """

    engine: EngineDriver
    fabric: TransferDriver
    region: MemoryRegion
    new_transport: Callable[[], Transport]
    on_transport: Callable[[str], None] | None = None
    on_renewed: Callable[[], None] | None = None
