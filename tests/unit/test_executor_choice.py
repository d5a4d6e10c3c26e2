"""Which executor a worker runs, and what it says where that is not the best one."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from core.config import EngineConfig
from core.errors import ConfigError
from core.kv_layout import KvDtype
from deploy.worker.executor_choice import choose_executor, layout_for
from engine.kernels.cpu import library as native_library
from tests.tiny_models import tiny_spec


def test_native_where_it_can_run(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_executor(EngineConfig(), tiny_spec()) == "native"
    assert choose_executor(EngineConfig(executor="native"), tiny_spec()) == "native"
    assert choose_executor(EngineConfig(executor="torch"), tiny_spec()) == "torch"
    assert choose_executor(EngineConfig(executor="mock"), tiny_spec()) == "mock"
    assert not caplog.records


@pytest.fixture
def not_loaded() -> Iterator[None]:
    """Let the library be loaded anew, and once more for whoever comes next."""
    cached = (native_library.library, native_library.kernel_tables)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_torch_where_it_was_not_built(
    not_loaded: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("DOVETAIL_NATIVE_LIBRARY", str(tmp_path / "missing.so"))
    with caplog.at_level(logging.WARNING):
        assert choose_executor(EngineConfig(), tiny_spec()) == "torch"
    (record,) = caplog.records
    assert record.getMessage().startswith("the torch executor serves, slower than the native one: ")
    assert "not built: install again where a C++17 compiler is found" in record.getMessage()
    with pytest.raises(ConfigError, match=r"^engine\.executor = 'native': the native kernels were"):
        choose_executor(EngineConfig(executor="native"), tiny_spec())


def test_a_library_of_another_version_is_not_used(
    not_loaded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_library, "ABI_VERSION", 999)
    with caplog.at_level(logging.WARNING):
        assert choose_executor(EngineConfig(), tiny_spec()) == "torch"
    assert re.search(r"is of version \d+, this code of 999: install again", caplog.text)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (EngineConfig(device="cuda:0"), "it runs on CPUs, and engine.device is 'cuda:0'"),
        (EngineConfig(block_size=12), "block_size 12, head_dim 8: must be multiples of 8 and of 2"),
    ],
)
def test_torch_where_native_cannot_run(
    config: EngineConfig, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_executor(config, tiny_spec()) == "torch"
    (record,) = caplog.records
    assert why in record.getMessage()
    with pytest.raises(ConfigError, match=rf"^engine\.executor = 'native': {re.escape(why)}"):
        choose_executor(replace(config, executor="native"), tiny_spec())


def test_layouts_are_each_executor_s_own() -> None:
    for config, order in (
        (EngineConfig(), "pairs"),
        (EngineConfig(kv_dtype="f32"), "pairs"),
        (EngineConfig(kv_dtype="int8"), "quads"),
    ):
        layout = layout_for("native", config, tiny_spec())
        assert layout.layers[0].tile_order == order
    layout = layout_for("torch", EngineConfig(), tiny_spec())
    assert (layout.layers[0].tile_order, layout.layers[0].dtype) == ("token_major", KvDtype.BF16)
    with pytest.raises(
        ConfigError, match=r"^engine\.kv_dtype = 'int8' in the torch executor: int8"
    ):
        layout_for("torch", EngineConfig(kv_dtype="int8"), tiny_spec())


NATIVE_WORKER = """
import sys
import deploy.worker.process
from core.config import load
from deploy.model_path import resolve_model
from deploy.worker.replica import load_executor, make_engine, plan_replica
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.region import HostRegion

config = load({}, {"engine.kv_memory": "16000000", "engine.threads": "1"})
path = resolve_model("")
plan = plan_replica(config, path)
region = HostRegion(plan.num_blocks * plan.layout.block_bytes)
executor = load_executor(config, plan, path, region)
transport = NixlTransport("agent", listen="127.0.0.1")
assert executor.numerics.startswith("native-"), executor.numerics
make_engine(config, plan, executor)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers"}))
"""


@pytest.mark.parametrize(
    "program",
    [
        NATIVE_WORKER,
        "import sys, deploy.router_process\nprint(sorted({'torch', 'numpy'} & set(sys.modules)))",
    ],
    ids=["worker", "router"],
)
def test_no_process_imports_torch_that_does_without(program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"XDG_CACHE_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
