"""What a worker refuses before it reads any weight."""

from __future__ import annotations

import pytest

from core.config import Config, EngineConfig, ModelConfig
from core.errors import ConfigError
from deploy.model_path import resolve_model
from deploy.worker.replica import plan_replica


def test_a_pool_of_less_than_two_blocks_is_refused() -> None:
    config = Config(engine=EngineConfig(kv_memory=1))
    with pytest.raises(ConfigError, match=r"^engine\.kv_memory = 1: must hold at least two blocks"):
        plan_replica(config, resolve_model(""))


def test_a_context_that_the_model_does_not_have_is_refused() -> None:
    config = Config(model=ModelConfig(max_model_len=1 << 20))
    with pytest.raises(ConfigError, match=r"^model\.max_model_len = 1048576: must be at most 8192"):
        plan_replica(config, resolve_model(""))


def test_a_context_is_cut_to_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_replica(Config(engine=EngineConfig(kv_memory=1 << 20)), resolve_model(""))
    assert plan.max_model_len == plan.num_blocks * plan.layout.block_size < 8192
    assert "max_model_len is cut from 8192" in caplog.text
