"""core.environment: children inherit ours without proxies, which never redirect our channels."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from core.environment import (
    cache_directory,
    child_environment,
    let_tokenizers_be_serial,
    openai_api_key,
    openai_base_url,
    pip_command,
    set_default,
    temporary_directory,
    without_proxies,
)


def value_of(name: str) -> str | None:
    """Read a variable as a library does, not through the module under test."""
    value = os.path.expandvars(f"${name}")
    return None if value == f"${name}" else value


PROXIES = ("HTTP_PROXY", "https_proxy", "ALL_PROXY", "grpc_proxy", "no_proxy")


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.setenv(name, "http://proxy.invalid:1")
    monkeypatch.setenv("DOVETAIL_TEST_KEPT", "kept")


@pytest.mark.usefixtures("proxied")
def test_child_gets_everything_but_proxies() -> None:
    environment = child_environment({"EXTRA": "1"})
    assert not {name.lower() for name in environment} & {name.lower() for name in PROXIES}
    assert environment["DOVETAIL_TEST_KEPT"] == "kept"
    assert environment["EXTRA"] == "1"
    assert value_of("HTTP_PROXY") == "http://proxy.invalid:1", "the parent's own stay"


@pytest.mark.usefixtures("proxied")
def test_own_proxies_can_be_dropped() -> None:
    without_proxies()
    assert [value_of(name) for name in PROXIES] == [None] * len(PROXIES)
    assert value_of("DOVETAIL_TEST_KEPT") == "kept"


def test_default_does_not_override_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_TEST_SET", "user")
    monkeypatch.setenv("DOVETAIL_TEST_UNSET", "")  # so that its absence is restored afterwards
    monkeypatch.delenv("DOVETAIL_TEST_UNSET")
    set_default("DOVETAIL_TEST_SET", "ours")
    set_default("DOVETAIL_TEST_UNSET", "ours")
    assert value_of("DOVETAIL_TEST_SET") == "user"
    assert value_of("DOVETAIL_TEST_UNSET") == "ours"


def test_the_temporary_directory_is_there() -> None:
    assert temporary_directory().is_dir()


def test_the_pip_of_a_virtual_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sys, "prefix", "/my work/.venv")
    monkeypatch.setattr(sys, "executable", "/my work/.venv/bin/python")
    assert pip_command() == "'/my work/.venv/bin/python' -m pip"
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert pip_command() == "pip"


def test_openai_s_variables_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", " http://x/v1\n")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert (openai_base_url(), openai_api_key()) == ("http://x/v1", "")


def test_tokenizers_get_no_threads_unless_the_user_wants_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    let_tokenizers_be_serial()
    assert value_of("TOKENIZERS_PARALLELISM") == "false"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    let_tokenizers_be_serial()
    assert value_of("TOKENIZERS_PARALLELISM") == "true"


def test_files_that_can_be_made_again_go_where_xdg_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / "home" / ".cache" / "dovetail"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/ignored")
    assert cache_directory() == tmp_path / "home" / ".cache" / "dovetail"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "dovetail"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        msg = "Could not determine home directory."
        raise RuntimeError(msg)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_directory() is None
