"""deploy.launcher.etcd_component: an etcd that cannot start says why, before its log is gone."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from core.clock import SystemClock
from core.errors import ControlPlaneError
from deploy.launcher.etcd_component import EtcdComponent


@pytest.mark.anyio
async def test_failed_start_carries_etcds_last_words(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "member").write_text("not a directory")
    etcd = EtcdComponent(
        tmp_path / "data", log_path=tmp_path / "log", clock=SystemClock(), rng=Random(1)
    )
    with pytest.raises(ControlPlaneError, match=r"it said last: .*member.*not a directory"):
        await etcd.start()
    await etcd.stop()
