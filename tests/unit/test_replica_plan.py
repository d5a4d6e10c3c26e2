"""What a worker refuses before it reads any weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config import Config, EngineConfig
from core.errors import ConfigError
from deploy.worker.replica import plan_replica


def test_a_device_without_a_pool_is_refused_by_name() -> None:
    config = Config(engine=EngineConfig(device="cuda:0"))
    with pytest.raises(ConfigError, match=r"^engine\.device = 'cuda:0': must be 'cpu'; KV blocks"):
        plan_replica(config, Path("no model is read"))
