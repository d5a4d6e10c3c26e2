"""One worker's engine on a modelled device, as `deploy.worker.replica` makes it."""

from __future__ import annotations

from collections.abc import Callable

from core.config import Config
from core.ids import BlockId
from engine.engine import Engine, settings_for
from engine.executor.mock_executor import MockDevice
from engine.executor.mock_pool import mock_layout
from planner.protocol.executor import SimExecutor
from planner.protocol.region import SimRegion

VOCABULARY = 997


def make_engine(
    config: Config,
    region: SimRegion,
    num_blocks: int,
    device: MockDevice,
    on_write: Callable[[list[BlockId]], None],
) -> Engine:
    """Put the scheduler over an executor.

    Args:
        on_write: told the blocks that a step is about to write.
    """
    executor = SimExecutor(
        mock_layout(config.engine.block_size),
        region,
        num_blocks=num_blocks,
        vocab_size=VOCABULARY,
        config=config.engine,
        device=device,
    )
    executor.on_write = on_write
    settings = settings_for(
        executor,
        config.engine,
        max_model_len=num_blocks * config.engine.block_size,
        max_receiving_share=config.kv_transfer.max_receiving_share,
        vocab_size=VOCABULARY,
    )
    return Engine(
        executor,
        settings,
        fingerprint=bytes.fromhex(executor.layout.model),
        max_inflight=config.engine.max_inflight,
    )
