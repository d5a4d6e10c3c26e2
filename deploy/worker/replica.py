"""One worker's model replica: layout, pool, executor and engine, from a configuration.

The pool's region belongs to the caller, which registers it with the fabric and closes it last.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from core.config import Config
from core.environment import cache_directory
from core.errors import ConfigError
from core.kv_layout import KvLayout
from deploy.worker.executor_choice import ExecutorName, choose_executor, layout_for
from engine.engine import Engine, settings_for
from engine.executor.interface import Executor
from engine.executor.mock_executor import MockExecutor
from engine.executor.mock_pool import mock_layout
from engine.executor.native_executor import NativeExecutor
from engine.executor.native_model import load_model
from engine.executor.threaded_executor import ThreadedExecutor
from engine.models.read_spec import read_spec
from engine.models.spec import ModelSpec
from kv_transfer.region import HostRegion

_log = logging.getLogger(__name__)


class ReplicaPlan(msgspec.Struct, frozen=True):
    """What a worker can say of its replica before any weight is read.

    Attributes:
        executor: which one computes.
        model_name: as the API names it.
        max_model_len: tokens of prompt and output together, cut to the pool.
    """

    spec: ModelSpec
    executor: ExecutorName
    model_name: str
    layout: KvLayout
    num_blocks: int
    max_model_len: int


def plan_replica(config: Config, model_path: Path) -> ReplicaPlan:
    """Read what the model is and lay its pool out.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: the pool holds less than two blocks.
    """
    engine = config.engine
    spec = read_spec(model_path)
    executor = choose_executor(engine, spec)
    if executor == "mock":
        layout = mock_layout(engine.block_size)
    else:
        layout = layout_for(executor, engine, spec)
    num_blocks = engine.kv_memory // layout.block_bytes
    if num_blocks < 2:
        msg = (
            f"engine.kv_memory = {engine.kv_memory}: must hold at least two blocks of "
            f"{layout.block_bytes} bytes"
        )
        raise ConfigError(msg)
    return ReplicaPlan(
        spec=spec,
        executor=executor,
        model_name=config.model.served_name or spec.name,
        layout=layout,
        num_blocks=num_blocks,
        max_model_len=_max_model_len(config, spec, num_blocks),
    )


def _max_model_len(config: Config, spec: ModelSpec, num_blocks: int) -> int:
    wanted = config.model.max_model_len or spec.max_positions
    if wanted > spec.max_positions:
        msg = (
            f"model.max_model_len = {wanted}: must be at most {spec.max_positions}, "
            f"the context of {spec.name}"
        )
        raise ConfigError(msg)
    capacity = num_blocks * config.engine.block_size
    if wanted > capacity:
        _log.warning(
            "max_model_len is cut from %d to %d tokens, what engine.kv_memory = %d holds",
            wanted,
            capacity,
            config.engine.kv_memory,
        )
    return min(wanted, capacity)


def load_executor(
    config: Config, plan: ReplicaPlan, model_path: Path, region: HostRegion
) -> Executor:
    """Load the weights and make the executor; may take seconds, blocks.

    Raises:
        ConfigError: a setting that this executor does not have.
        ModelError: a weight is missing or of a type that is not supported.
    """
    places = (config.engine, plan.layout, region, plan.num_blocks)
    if plan.executor == "mock":
        return MockExecutor(
            plan.layout,
            region,
            num_blocks=plan.num_blocks,
            vocab_size=plan.spec.vocab_size,
            config=config.engine,
        )

    if plan.executor == "native":
        cache = cache_directory()
        model = load_model(
            plan.spec,
            model_path,
            config.engine.weights,
            cache=None if cache is None else cache / "weights",
        )
        executor = NativeExecutor(plan.spec, model, *places)
        return ThreadedExecutor(executor) if config.engine.max_inflight > 1 else executor
    # Imported here: torch takes seconds, and the others do without it.
    from engine.executor.torch_executor import TorchExecutor  # noqa: PLC0415

    return TorchExecutor(plan.spec, model_path, *places)


def make_engine(config: Config, plan: ReplicaPlan, executor: Executor) -> Engine:
    """Put the scheduler over an executor."""
    settings = settings_for(
        executor,
        config.engine,
        max_model_len=plan.max_model_len,
        max_receiving_share=config.kv_transfer.max_receiving_share,
        vocab_size=plan.spec.vocab_size,
    )
    return Engine(
        executor,
        settings,
        fingerprint=bytes.fromhex(plan.spec.fingerprint),
        max_inflight=config.engine.max_inflight,
    )
