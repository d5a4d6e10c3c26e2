"""deploy.settings: which source wins, and files that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import ConfigError
from deploy.settings import load_config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text('[log]\nformat = "json"\n[http]\nport = 1\n')
    return path


def test_later_sources_win(file: Path) -> None:
    assert load_config(file).http.port == 1
    assert load_config(file, ["http.port=2"]).http.port == 2
    assert load_config(file, ["http.port=2"], {"http.port": "3"}).http.port == 3


def test_default_of_a_command_yields_to_every_source(file: Path) -> None:
    quiet = {"log.level": "warning", "log.format": "text"}
    config = load_config(file, defaults=quiet)
    assert (config.log.level, config.log.format) == ("warning", "json")
    assert load_config(None, ["log.level=debug"], defaults=quiet).log.level == "debug"


def test_section_that_is_no_table_is_refused_not_filled(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('log = "debug"\n')
    with pytest.raises(ConfigError, match="log is a section"):
        load_config(path, defaults={"log.level": "warning"})


def test_value_may_hold_equals_signs_and_spaces() -> None:
    config = load_config(None, ["api.keys = a=b, c"])
    assert config.api.keys == ("a=b", "c")


@pytest.mark.parametrize("text", ["", "=", "http", "http=1", "http.=1", ".port=1", "http.port"])
def test_assignment_without_section_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(None, [text])


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[http\n", "not valid TOML.*line 1"), (b"\xff", "UTF-8"), (None, "No such file")],
)
def test_unreadable_file_is_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "cluster.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refusal:
        load_config(path)
    assert str(path) in str(refusal.value)


def test_a_device_without_a_pool_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.device = 'cuda:0': must be 'cpu'; KV blocks"):
        load_config(None, ["engine.device=cuda:0"])
    mock = load_config(None, ["engine.device=cuda:0", "engine.executor=mock"])
    assert mock.engine.device == "cuda:0"
